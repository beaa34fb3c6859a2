"""Measures a speculator against plain decoding in the same runtime and `generate` of transformers.

Every figure is a median over runs in which the contenders took turns (see `contenders`).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.artifacts.plan import dtype_name
from headstart.heads.group import members

from ..rules.registry import choose_rule
from ..speculator import Speculator
from ..stats import Stats
from .baselines import Contender, Runs, bare_loop, generating, race, speculating
from .timing import Stopwatch

_REPLAYED_PROMPTS = 8
"""Prompts whose forwards are replayed alone to find the loop's own cost."""


@dataclass(frozen=True)
class Measured:
    """One prompt: every contender's runs, the speculator's rounds, and its loop's cost a round."""

    runs: dict[str, Runs]
    stats: Stats
    loop_ms: float


def bench(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int = 128,
    *,
    repeats: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode every prompt with every contender, one prompt at a time.

    Args:
        prompts: token ids, each [P] or [1, P].
        repeats: times each contender decodes each prompt, after one round of warming up.
        temperature: 0 decodes greedily; otherwise text is sampled with a seed per prompt.

    Returns:
        The report: `tau`, `tau_by_prompt`, `acceptance_by_depth`, `identical_to_plain`,
        `identical_to_generate` (None when sampling: generate draws from another generator),
        `speedup_vs_plain` and `speedup_vs_generate` (median, min, max over prompts), milliseconds
        per token of every contender, `ms_per_round`, `loop_overhead_ms` (a round minus its forwards
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
    model = speculator.model
    contenders: dict[str, Contender] = {
        "plain": speculating(_plain(speculator), **seeded),
        "speculator": speculating(speculator, **seeded),
        "generate": generating(model, **options),
        "bare": bare_loop(model, new_tokens),
    }
    measured = []
    for prompt, runs in race(contenders, prompts, speculator.device, repeats):
        stats = speculator.stats
        loop = math.nan
        apart = speculator.graphs is None and not speculator.target.windows.tree
        if apart and stats.rounds and len(measured) < _REPLAYED_PROMPTS:
            again = functools.partial(contenders["speculator"], prompt)
            replayed = statistics.median(_replay(speculator, again) for _ in range(repeats))
            loop = 1e3 * (runs["speculator"].seconds - replayed) / stats.rounds
        measured.append(Measured(runs, stats, loop))
    return _report(speculator, measured, sampled)


def _plain(speculator: Speculator) -> Speculator:
    """Plain decoding by the same means."""
    graphs, compiled = speculator.graphs is not None, speculator.target.compile
    return Speculator(speculator.model, graphs=graphs, compile=compiled)


def _replay(speculator: Speculator, decode: Callable[[], object]) -> float:
    """Seconds that the forwards of one decoded prompt take alone, target and drafter.

    Every call is recorded while decoding and then repeated with nothing in between; the prefill's
    are left out.
    """
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
    seconds, watch = 0.0, Stopwatch(target.device)
    with torch.no_grad():
        for function, args, kwargs in calls[1:]:
            if (slab := kwargs.get("past_key_values")) is not None:
                root, nodes = int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]
                masks = kwargs["attention_mask"]
                mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
                live = root + 1 if mask is None else mask.shape[3]
                slab.set_slots(range(root, root + nodes), live, root if mask is None else 0)
            started = watch.mark()
            function(*args, **kwargs)
            seconds += watch.between(started, watch.mark()) / 1e3
    return seconds


def _report(speculator: Speculator, measured: list[Measured], sampled: bool) -> dict[str, Any]:
    stats = Stats(speculator.tree.max_depth)
    for one in measured:
        stats.extend(one.stats)

    def middle(values: Iterable[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return statistics.median(known) if known else math.nan

    def per_token(name: str) -> float:
        return middle(one.runs[name].per_token for one in measured)

    def speedup(name: str) -> dict[str, float]:
        ratios = [one.runs[name].per_token / one.runs["speculator"].per_token for one in measured]
        return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}

    def identical(name: str) -> bool:
        return all(one.runs[name].tokens == one.runs["speculator"].tokens for one in measured)

    texts = [one.runs["speculator"].tokens for one in measured]
    grams = [tuple(text[i : i + 4]) for text in texts for i in range(len(text) - 3)]
    model = speculator.model
    rule = choose_rule(speculator.rule, sampled)
    return {
        "tau": stats.tau,
        "tau_by_prompt": [one.stats.tau for one in measured],
        "acceptance_by_depth": stats.acceptance_by_depth,
        "identical_to_plain": identical("plain") if rule.same_text else None,
        "identical_to_generate": None if sampled else identical("generate"),
        "speedup_vs_plain": speedup("plain"),
        "speedup_vs_generate": speedup("generate"),
        "plain_ms_per_token": per_token("plain"),
        "generate_ms_per_token": per_token("generate"),
        "bare_loop_ms_per_token": per_token("bare"),
        "ms_per_round": middle(
            1e3 * one.runs["speculator"].seconds / max(one.stats.rounds, 1) for one in measured
        ),
        "loop_overhead_ms": middle(one.loop_ms for one in measured),
        "prefill_ms": middle(1e3 * s for one in measured for s in one.runs["speculator"].prefill),
        "nodes": speculator.tree.nodes,
        "tree": str(speculator.tree),
        "tree_label": speculator.tree.label,
        "rule": rule.name,
        "exact": rule.exact,
        "dtype": dtype_name(model),
        "device": speculator.device.type,
        "prompts": len(measured),
        "tokens": sum(map(len, texts)),
        "distinct_4grams": len(set(grams)) / len(grams) if grams else math.nan,
        "threads": torch.get_num_threads(),
    }
