"""The parts that decode with the target and the drafters that the suite trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads import family
from headstart.heads.artifacts.source import DrafterSource
from headstart.infer import Speculator
from headstart.infer.measure.baselines import (
    TimedDecode,
    decode_in_turns,
    timed_generate,
    timed_speculator,
)
from headstart.infer.measure.lossless_greedy import compare_greedy
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.planner import make_plan
from headstart.infer.measure.ranks import measure_ranks, replay
from headstart.reports.description import describe
from headstart.train import pipeline

from .entries import Entries
from .job import Job
from .static_generate import static_generate
from .trained import Pair, recipe_of, trained_pair


def heads(job: Job, entries: Entries) -> None:
    """A drafter of every family; the first one waits for corpus, target and text as well."""

    def work(name: str) -> dict[str, Any]:
        folder = pipeline.train(recipe_of(job, name))
        found = describe(folder)
        metrics = Path(DrafterSource(folder).own_target) / "metrics.json"
        return {
            "parameters": found["parameters"],
            "metrics": found["metrics"],
            "target": json.loads(metrics.read_text(encoding="utf-8")),
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def acceptance(job: Job, entries: Entries) -> None:
    """What each round of real decoding accepted, and the ranks that give it for any tree."""

    def work(name: str) -> dict[str, Any]:
        pair = trained_pair(job, name, job.dtype)
        written, depth = job.scale.written, job.scale.depth
        texts = write_texts(pair.target, pair.drafter, pair.prompts, written)
        ranks = measure_ranks(pair.drafter, texts, depth)
        decoder = Speculator(pair.target, pair.drafter, tree=pair.tree)
        counts, grams = [], []
        for ids in pair.prompts:
            text = decoder.generate(ids, max_new_tokens=written, do_sample=False)
            counts.append(decoder.stats.counts.flatten().tolist())
            new = text[0, ids.shape[1] :].tolist()
            grams += [tuple(new[i : i + 4]) for i in range(len(new) - 3)]
        again = replay(ranks, pair.tree.paths)
        return {
            "trained": pair.id,
            "tree": pair.tree.label,
            "paths": [list(path) for path in pair.tree.paths],
            "tau": sum(map(sum, counts)) / max(sum(map(len, counts)), 1),
            "counts": counts,
            "replayed_tau": again.tau,
            "distinct_4grams": len(set(grams)) / max(len(grams), 1),
            "target_parameters": pair.target.num_parameters(),
            "independent": pair.drafter.independent,
            "ranks": [each.tolist() for each in ranks],
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def identity(job: Job, entries: Entries) -> None:
    """Greedy text in float32 against that of `generate`."""

    def work(name: str) -> dict[str, Any]:
        pair = trained_pair(job, name, torch.float32)
        decoder = Speculator(pair.target, pair.drafter, tree=pair.tree)
        found = compare_greedy(decoder, pair.prompts, job.scale.written, progress=True)
        ties = sum(divergence.near_tie for divergence in found.divergences)
        return {
            "trained": pair.id,
            "prompts": found.prompts,
            "tokens": found.tokens,
            "divergences": len(found.divergences),
            "near_ties": ties,
            "tree": pair.tree.label,
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def baselines(job: Job, entries: Entries) -> None:
    """Real decoding of the trained target, one prompt at a time, in turns."""
    for name in job.families:
        entries.measure(name, functools.partial(_decode_in_turns, job, name))


def _decode_in_turns(job: Job, name: str) -> dict[str, Any]:
    pair = trained_pair(job, name, job.dtype)
    options: dict[str, Any] = {"max_new_tokens": job.scale.written, "do_sample": False}
    # The first prompts choose the trees, the others are decoded: no tree is judged by its own text.
    half = max(len(pair.prompts) // 2, 1)
    plan = make_plan(
        pair.target, pair.drafter, pair.prompts[:half],
        max_nodes=job.scale.nodes, new_tokens=job.scale.written,
    )  # fmt: skip
    best = {"tree": plan.candidates[0]}
    best["chain"] = next(c for c in plan.candidates if c["name"].startswith("chain:"))
    decoders: dict[str, TimedDecode] = {
        "plain": timed_speculator(Speculator(pair.target), **options),
        "generate": timed_generate(pair.target, **options),
    }
    for kind, candidate in best.items():
        decoder = Speculator(pair.target, pair.drafter, tree=candidate["tree"])
        decoders[kind] = timed_speculator(decoder, **options)
    decoders |= _generate_with(pair, best["chain"]["depth"], options)
    longest = max(pair.prompts, key=lambda ids: ids.numel()).reshape(1, -1).to(job.on)
    fastest, missing = static_generate(pair.target, longest, options)
    decoders |= fastest
    found = list(decode_in_turns(decoders, pair.prompts[half:], job.on, job.scale.turns, name))
    per_token = {who: [runs[who].per_token for _, runs in found] for who in decoders}
    tokens = {who: [runs[who].tokens for _, runs in found] for who in decoders}
    return {
        "trained": pair.id,
        "trees": {kind: {k: c[k] for k in ("name", "nodes", "tree")} for kind, c in best.items()},
        "prompts": len(found),
        "ms_per_token": per_token,
        "tokens": sum(map(len, tokens["plain"])),
        "same_text": {who: each == tokens["generate"] for who, each in tokens.items()},
        "left_out": {"generate_static": missing} if missing else {},
    }


def _generate_with(pair: Pair, length: int, options: dict[str, Any]) -> dict[str, TimedDecode]:
    """`generate` of transformers with the same drafter, where it has such a drafter.

    The assistant is the very same model, once with the same chain in every round, and once with the
    settings that transformers gives it.
    """
    if type(pair.drafter) is family("lookup"):
        looking = {"prompt_lookup_num_tokens": length}
        return {"prompt_lookup": timed_generate(pair.target, **options, **looking)}
    if type(pair.drafter) is not family("draft_model"):
        return {}
    student: Any = pair.drafter.model
    settings = student.generation_config
    fixed = {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    usual = {key: getattr(settings, key, None) for key in fixed}

    def assisted(given: Mapping[str, Any]) -> TimedDecode:
        decode = timed_generate(pair.target, **options, assistant_model=student)

        def run(ids: Tensor) -> Any:
            for key, value in given.items():
                setattr(settings, key, value)
            return decode(ids)

        return run

    return {"assistant": assisted(fixed), "assistant_default": assisted(usual)}


def batches(job: Job, entries: Entries) -> None:
    """The planner's tree for each batch, against plain decoding of the same batch."""

    @functools.lru_cache(maxsize=1)
    def pair_of(name: str) -> Pair:
        return trained_pair(job, name, job.dtype)

    def work(name: str, batch: int) -> dict[str, Any]:
        pair = pair_of(name)
        plan = make_plan(
            pair.target, pair.drafter, pair.prompts,
            batch_size=batch, max_nodes=job.scale.nodes, new_tokens=job.scale.written, measure=2,
        )  # fmt: skip
        best = plan.candidates[0]
        return {
            "trained": pair.id,
            "family": name,
            "batch": batch,
            "policy": plan.policy,
            "speedup": plan.speedup,
            "best": {key: best[key] for key in ("name", "nodes", "measured_speedup")},
            "plain_ms": plan.costs["plain"],
        }

    for name in job.families:
        for batch in job.scale.batches:
            entries.measure(f"{name} batch {batch}", functools.partial(work, name, batch))
