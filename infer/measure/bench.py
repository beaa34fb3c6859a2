"""Measures a speculator against plain decoding in the same runtime and `generate` of transformers.

Every figure is a median over runs that took turns (see `baselines`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.artifacts.plan import dtype_name
from headstart.heads.group import members

from ..rules.registry import choose_rule
from ..speculator import Speculator
from ..stats import Stats
from .baselines import (
    Runs,
    TimedDecode,
    decode_in_turns,
    timed_bare_loop,
    timed_generate,
    timed_speculator,
)
from .timing import Stopwatch

_REPLAYED_PROMPTS = 8  # whose forwards are replayed alone to find the loop's own cost


def bench(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int = 128,
    *,
    repeats: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode every prompt with the speculator and its baselines in turn, one prompt at a time.

    Args:
        prompts: token ids, each [P] or [1, P].
        repeats: how often each prompt is decoded in each way, once all have been warmed up.
        temperature: 0 decodes greedily; otherwise text is sampled with a seed per prompt.

    Returns:
        The report: `tau`, `tau_by_prompt`, `acceptance_by_depth`, `identical_to_plain`,
        `identical_to_generate` (None when sampling: generate draws from another generator),
        `speedup_vs_plain` and `speedup_vs_generate` (median, min, max over prompts), milliseconds
        per token of each, `ms_per_round`, `loop_overhead_ms` (a round minus its forwards
        replayed alone; NaN where rounds are captured whole, or attend as trees), the settings, and
        `distinct_4grams` of the text.

    Raises:
        OptionError: no prompt, or fewer than two new tokens.
    """
    if not prompts or new_tokens < 2 or repeats < 1:
        raise OptionError(
            f"found {len(prompts)} prompts, {new_tokens} new tokens and {repeats} repeats; a "
            "measurement needs at least 1, 2 and 1."
        )
    sampled = temperature > 0
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": sampled}
    if sampled:
        options |= {"temperature": temperature, "top_k": 0}
    seeded = options | ({"seed": seed} if sampled else {})
    model, captured = speculator.model, speculator.graphs is not None
    plain = Speculator(model, graphs=captured, compile=speculator.target.compile)
    decoders: dict[str, TimedDecode] = {
        "plain": timed_speculator(plain, **seeded),
        "speculator": timed_speculator(speculator, **seeded),
        "generate": timed_generate(model, **options),
        "bare": timed_bare_loop(model, new_tokens),
    }
    runs: dict[str, list[Runs]] = {name: [] for name in decoders}
    rounds, loops = [], []
    for prompt, found in decode_in_turns(decoders, prompts, speculator.device, repeats):
        for name, each in found.items():
            runs[name].append(each)
        rounds.append(speculator.stats)
        if len(rounds) <= _REPLAYED_PROMPTS:
            took = found["speculator"].decode_ms
            loops.append(_overhead(speculator, decoders["speculator"], prompt, took, repeats))
    return _report(speculator, runs, rounds, [ms for ms in loops if ms is not None], sampled)


def _report(
    speculator: Speculator,
    runs: dict[str, list[Runs]],
    rounds: list[Stats],
    loops: list[float],
    sampled: bool,
) -> dict[str, Any]:
    """The report of `bench`, from each prompt's runs and rounds."""
    ours, stats = runs["speculator"], Stats(speculator.tree.max_depth)
    for each in rounds:
        stats.extend(each)
    texts = [each.tokens for each in ours]
    grams = [tuple(text[i : i + 4]) for text in texts for i in range(len(text) - 3)]
    per_token = {name: [each.per_token for each in of] for name, of in runs.items()}
    pairs = zip(ours, rounds, strict=True)
    per_round = [each.decode_ms / max(done.rounds, 1) for each, done in pairs]

    def speedup(name: str) -> dict[str, float]:
        pairs = zip(per_token[name], per_token["speculator"], strict=True)
        ratios = [theirs / drafted for theirs, drafted in pairs]
        return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}

    def identical(name: str) -> bool:
        return [each.tokens for each in runs[name]] == texts

    rule = choose_rule(speculator.rule, sampled)
    return {
        "tau": stats.tau,
        "tau_by_prompt": [each.tau for each in rounds],
        "acceptance_by_depth": stats.acceptance_by_depth,
        "identical_to_plain": identical("plain") if rule.same_text else None,
        "identical_to_generate": None if sampled else identical("generate"),
        "speedup_vs_plain": speedup("plain"),
        "speedup_vs_generate": speedup("generate"),
        "plain_ms_per_token": median(per_token["plain"]),
        "generate_ms_per_token": median(per_token["generate"]),
        "bare_loop_ms_per_token": median(per_token["bare"]),
        "ms_per_round": median(per_round),
        "loop_overhead_ms": median(loops) if loops else math.nan,
        "prefill_ms": median(ms for each in ours for ms in each.prefill_ms),
        "nodes": speculator.tree.nodes,
        "tree": str(speculator.tree),
        "tree_label": speculator.tree.label,
        "rule": rule.name,
        "exact": rule.exact,
        "dtype": dtype_name(speculator.model),
        "device": speculator.device.type,
        "prompts": len(ours),
        "tokens": sum(map(len, texts)),
        "distinct_4grams": len(set(grams)) / len(grams) if grams else math.nan,
        "threads": torch.get_num_threads(),
    }


def _overhead(
    speculator: Speculator, decode: TimedDecode, prompt: Tensor, decode_ms: float, repeats: int
) -> float | None:
    """Milliseconds a round of a prompt that was just decoded, less its forwards replayed alone.

    None where rounds are captured whole, or attend as trees, and where there was none.
    """
    rounds = speculator.stats.rounds
    if speculator.graphs is not None or speculator.target.windows.tree or not rounds:
        return None
    replayed = median(_replay(speculator, lambda: decode(prompt)) for _ in range(repeats))
    return (decode_ms - replayed) / rounds


def _replay(speculator: Speculator, decode: Callable[[], object]) -> float:
    """Milliseconds that the forwards of one decoded prompt take alone, the prefill's left out."""
    target, drafters = speculator.target, members(speculator.drafter)
    calls: list[tuple[Callable, tuple, dict]] = []

    def recorded(function: Callable) -> Callable:
        def record(*args, **kwargs):
            # A count of 0, in place of `begin`'s own: the drafter's cache does not grow in replays.
            still = [torch.zeros_like(args[3])] if function.__name__ == "begin" else args[3:]
            calls.append((function, (*args[:3], *still), kwargs))
            return function(*args, **kwargs)

        return record

    patches = [(target.model, "forward")]
    patches += [(drafter, name) for drafter in drafters for name in ("begin", "extend")]
    for owner, name in patches:
        object.__setattr__(owner, name, recorded(getattr(owner, name)))
    try:
        decode()
    finally:
        for owner, name in patches:
            object.__delattr__(owner, name)
    milliseconds, watch = 0.0, Stopwatch(target.device)
    with torch.no_grad():
        for function, args, kwargs in calls[1:]:
            if (slab := kwargs.get("past_key_values")) is not None:
                root, nodes = int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]
                masks = kwargs.get("attention_mask")
                mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
                live = root + 1 if mask is None else mask.shape[3]
                slab.set_slots(range(root, root + nodes), live, root if mask is None else 0)
            milliseconds += watch.time(functools.partial(function, *args, **kwargs))
    return milliseconds
