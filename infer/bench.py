"""Measures a speculator against plain decoding in the same runtime and `generate` of transformers.

The contenders decode each prompt in turn, several times over, and every figure is a median, so that
a machine whose speed drifts slows all of them alike. Times run from a prompt's first token to its
last; the prefill is reported apart.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.heads import OptionError

from .plan import dtype_name
from .rules import APPROXIMATE
from .speculator import Speculator
from .stats import Stats

_REPLAYED_PROMPTS = 8
"""Prompts whose forwards are replayed alone to find the loop's own cost."""


class Timed(NamedTuple):
    """One run of one contender: text [1, P + new], seconds until its first token, and after it."""

    text: Tensor
    prefill: float
    decode: float


class _Clock(BaseStreamer):
    """A streamer that notes when `generate` hands over its first token."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the prompt comes before it
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


@dataclass
class Runs:
    """One contender's runs of one prompt: seconds per run, and the new tokens of the last one."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def note(self, run: Timed, prompt: int) -> None:
        """Keep one run of a prompt of so many tokens."""
        self.decode.append(run.decode)
        self.prefill.append(run.prefill)
        self.tokens = run.text[0, prompt:].tolist()

    @property
    def seconds(self) -> float:
        """The median run's seconds after the first token."""
        return statistics.median(self.decode)

    @property
    def per_token(self) -> float:
        """Milliseconds per token after the first."""
        return 1e3 * self.seconds / max(len(self.tokens) - 1, 1)


@dataclass(frozen=True)
class Measured:
    """One prompt: every contender's runs, the speculator's rounds, and its loop's cost a round."""

    runs: dict[str, Runs]
    stats: Stats
    loop_ms: float


Contender = Callable[[Tensor], Timed]
"""Decodes one prompt [1, P]."""


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
        replayed alone), the settings, and `distinct_4grams` of the text.

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

    def ours(decoder: Speculator) -> Contender:
        extra = {"seed": seed} if sampled else {}

        def decode(ids: Tensor) -> Timed:
            text = decoder.generate(ids, **options, **extra)
            return Timed(text, decoder.stats.prefill_seconds, decoder.stats.decode_seconds)

        return decode

    def generate(ids: Tensor) -> Timed:
        clock, begun = _Clock(), time.perf_counter()
        text = speculator.model.generate(ids, streamer=clock, **options)  # type: ignore[operator]
        return Timed(text, clock.first - begun, time.perf_counter() - clock.first)

    contenders: dict[str, Contender] = {
        "plain": ours(Speculator(speculator.model)),
        "speculator": ours(speculator),
        "generate": generate,
        "bare": lambda ids: _bare_loop(speculator.model, ids, new_tokens),
    }
    device = speculator.model.device
    measured = []
    for number, prompt in enumerate(tqdm(prompts, desc="bench", unit="prompt", file=sys.stderr)):
        ids = prompt.reshape(1, -1).to(device)
        runs = {name: Runs() for name in contenders}
        for repeat in range(-1 if number == 0 else 0, repeats):
            for name, decode in contenders.items():
                run = decode(ids)
                if repeat >= 0:
                    runs[name].note(run, ids.shape[1])
        stats = speculator.stats
        loop = math.nan
        if number < _REPLAYED_PROMPTS and stats.rounds:
            again = functools.partial(contenders["speculator"], ids)
            replayed = statistics.median(_replay(speculator, again) for _ in range(repeats))
            loop = 1e3 * (runs["speculator"].seconds - replayed) / stats.rounds
        measured.append(Measured(runs, stats, loop))
    return _report(speculator, measured, sampled)


def _bare_loop(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> Timed:
    """The least that greedy decoding with transformers can be: a DynamicCache and an argmax."""
    begun = time.perf_counter()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        text = [ids, token]
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            text.append(token)
    return Timed(torch.cat(text, 1), first - begun, time.perf_counter() - first)


def _replay(speculator: Speculator, decode: Callable[[], object]) -> float:
    """Seconds that the forwards of one decoded prompt take alone, target and drafter.

    Every call is recorded while decoding and then repeated with nothing in between; the prefill's
    are left out.
    """
    target, drafter = speculator.target, speculator.drafter
    calls: list[tuple[Callable, tuple, dict]] = []

    def recorded(function: Callable) -> Callable:
        def record(*args, **kwargs):
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        return record

    patches = [(target.model, "forward")]
    if drafter is not None:
        patches += [(drafter, "begin"), (drafter, "extend")]
    for owner, name in patches:
        object.__setattr__(owner, name, recorded(getattr(owner, name)))
    try:
        decode()
    finally:
        for owner, name in patches:
            object.__delattr__(owner, name)
    seconds = 0.0
    with torch.no_grad():
        for function, args, kwargs in calls[1:]:
            if (slab := kwargs.get("past_key_values")) is not None:
                root, nodes = int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]
                masks = kwargs["attention_mask"]
                mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
                live = root + 1 if mask is None else mask.shape[3]
                slab.aim(range(root, root + nodes), live, root if mask is None else 0)
            started = time.perf_counter()
            function(*args, **kwargs)
            seconds += time.perf_counter() - started
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
    rule = (speculator.rule or "coupled") if sampled else "greedy"
    same_text = rule in ("greedy", "match", "coupled")  # the others keep the distribution alone
    return {
        "tau": stats.tau,
        "tau_by_prompt": [one.stats.tau for one in measured],
        "acceptance_by_depth": stats.acceptance_by_depth,
        "identical_to_plain": identical("plain") if same_text else None,
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
        "rule": rule,
        "exact": rule not in APPROXIMATE,
        "dtype": dtype_name(model),
        "device": model.device.type,
        "prompts": len(measured),
        "tokens": sum(map(len, texts)),
        "distinct_4grams": len(set(grams)) / len(grams) if grams else math.nan,
        "threads": torch.get_num_threads(),
    }
