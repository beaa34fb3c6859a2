"""The parts that time models of known shapes with random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.artifacts.trimming import trimmed
from headstart.heads.core import ArtifactError, OptionError
from headstart.infer.measure.candidates import rank_trees
from headstart.infer.measure.costs import Costs

from . import costs as shape_costs
from .bandwidth import copy_bandwidth
from .entries import Entries, read_part
from .job import Job
from .shapes import SHAPES, random_drafter, random_target


def bandwidth(job: Job, entries: Entries) -> None:
    """How fast the device copies."""
    scale = job.scale
    entries.measure("copy", lambda: copy_bandwidth(job.on, scale.copies, 2 * scale.repeats))


def costs(part: str, job: Job, entries: Entries) -> None:
    """What decoding costs at the part's shape."""
    scale, model = job.scale, _target_of(job, part)
    given = (scale.context, scale.tokens, scale.repeats, max(scale.copies))
    entries.measure("plain", lambda: shape_costs.plain_costs(model(), *given))
    entries.measure("compiled", lambda: shape_costs.compiled_costs(model(), *given))
    for length, nodes in ((scale.context, scale.trees), (scale.long_context, scale.long_trees)):
        entries.measure(
            f"trees at {length}",
            lambda length=length, nodes=nodes: {
                "context": length,
                "verify_ms": shape_costs.tree_costs(model(), length, nodes),
            },
        )

    def work(entry: str, family: str, vocabulary: int | None = None) -> dict[str, Any]:
        drafter = random_drafter(family, model())
        if vocabulary is not None:
            try:
                drafter = trimmed(drafter, torch.arange(vocabulary))
            except (ArtifactError, OptionError) as error:
                return {"family": family, "left_out": str(error)}
        depth = min(scale.depth, drafter.max_depth or scale.depth)
        choose = _chooser(job, entry, depth)
        found = shape_costs.round_costs(
            model(), drafter, choose, scale.context, scale.tokens, scale.repeats,
            scale.nodes, depth,
        )  # fmt: skip
        return {"family": family, **found}

    for name in job.families:
        entries.measure(name, functools.partial(work, name, name))
        if (size := job.vocabulary) is not None:
            entry = f"{name} with {size:,} tokens"
            entries.measure(entry, functools.partial(work, entry, name, size))


def _chooser(job: Job, name: str, depth: int) -> Callable[[Costs], dict[str, Any]]:
    """The trees to time: those that the acceptance part's ranks call best here, or usual ones."""
    ranks, independent = recorded(job.folder, name)

    def choose(costs: Costs) -> dict[str, Any]:
        usual = {"tree": shape_costs.usual_tree(job.scale.nodes, depth), "chain": [[0] * depth]}
        if not ranks:
            return usual
        best: dict[str, Any] = {}  # of either kind, where sizes that cost too much left any
        for each in rank_trees(ranks, costs, independent, job.scale.nodes):
            best.setdefault("chain" if each.name.startswith("chain:") else "tree", each.tree)
        return usual | best

    return choose


def recorded(folder: Path, name: str) -> tuple[list[Tensor], bool]:
    """A family's ranks as `acceptance` recorded them, and whether its heads are independent."""
    found = read_part(folder / "acceptance.json") or {"entries": {}}
    entry = found["entries"].get(name, {})
    return [torch.tensor(rows) for rows in entry.get("ranks", ())], entry.get("independent", False)


def batch_costs(part: str, job: Job, entries: Entries) -> None:
    """The planner's costs by batch; the report joins them with the recorded acceptance."""
    scale, model = job.scale, _target_of(job, part)

    def work(name: str, batch: int) -> dict[str, Any]:
        drafter = random_drafter(name, model())
        depth = min(scale.depth, drafter.max_depth or scale.depth)
        ids = shape_costs.random_prompt(model(), scale.context - scale.tokens // 2)
        costs = shape_costs.planner_costs(
            model(), drafter, ids.expand(batch, -1), scale.tokens, scale.nodes, depth
        )
        return {"family": name, "batch": batch, "costs": dataclasses.asdict(costs)}

    for name in job.families:
        for batch in scale.batches:
            entries.measure(f"{name} batch {batch}", functools.partial(work, name, batch))


def _target_of(job: Job, part: str) -> Callable[[], PreTrainedModel]:
    """The part's random target, made when it is first asked for."""

    @functools.cache
    def model() -> PreTrainedModel:
        return random_target(SHAPES[job.scale.shapes[part]], job.on, job.dtype)

    return model
