"""Measures a speculator against plain decoding in the same runtime and `generate` of transformers.

Every figure is a median over runs that took turns (see `baselines`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.artifacts.plan import dtype_name

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
from .loop_overhead import loop_overhead

_REPLAYED_PROMPTS = 8
"""Prompts whose forwards are replayed alone to find the loop's own cost."""


@dataclass(frozen=True)
class _Measured:
    """One prompt: its runs by decoder, the speculator's rounds, and its loop's cost a round."""

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
    model = speculator.model
    decoders: dict[str, TimedDecode] = {
        "plain": timed_speculator(_plain(speculator), **seeded),
        "speculator": timed_speculator(speculator, **seeded),
        "generate": timed_generate(model, **options),
        "bare": timed_bare_loop(model, new_tokens),
    }
    measured = []
    for prompt, runs in decode_in_turns(decoders, prompts, speculator.device, repeats):
        stats, loop = speculator.stats, math.nan
        if len(measured) < _REPLAYED_PROMPTS:
            took = runs["speculator"].decode_ms
            loop = loop_overhead(speculator, decoders["speculator"], prompt, took, repeats)
        measured.append(_Measured(runs, stats, loop))
    return _report(speculator, measured, sampled)


def _plain(speculator: Speculator) -> Speculator:
    """Plain decoding by the same means."""
    graphs, compiled = speculator.graphs is not None, speculator.target.compile
    return Speculator(speculator.model, graphs=graphs, compile=compiled)


def _report(speculator: Speculator, measured: list[_Measured], sampled: bool) -> dict[str, Any]:
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
            one.runs["speculator"].decode_ms / max(one.stats.rounds, 1) for one in measured
        ),
        "loop_overhead_ms": middle(one.loop_ms for one in measured),
        "prefill_ms": middle(ms for one in measured for ms in one.runs["speculator"].prefill_ms),
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
