"""What a run needs: disk, memory and time, as far as its settings say."""

from __future__ import annotations

import logging
import math
import os
import shutil
from dataclasses import dataclass

import torch

from headstart.heads import TrainableDrafter
from headstart.heads.core import total_bytes

from ..recipe import Recipe
from ..sizes import (
    ARTIFACT,
    ROW_TOKEN,
    STORED,
    adapter_parameters,
    collected_bytes,
    feature_bytes,
    packed_tokens,
    parameters_of,
    state_bytes,
    weight_bytes,
)
from ..stages.folders import stage_folders
from .plan import CheckError, Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """Sizes in bytes; what is not known before the run is not counted in `memory`."""

    target: float  # the weights as they are loaded
    drafter: int  # its parameters, without those of an adapter
    disk: float  # at most
    memory: float  # at least, of each process
    # The sum of the stages' bounds, without measuring the drafter; None where a stage has none. A
    # first shard of text, and a step or a validation that was begun, may take longer.
    seconds: float | None

    @property
    def text(self) -> str:
        """In two lines, which fit into 80 columns."""
        bound = "time unknown (`headstart check` measures it)"
        if self.seconds is not None:
            bound = f"about {math.ceil(self.seconds / 60)} min without measuring it"
        return (
            f"a drafter of {self.drafter:,} parameters; at least {size(self.memory)} of memory,\n"
            f"at most {size(self.disk)} of disk, {bound}"
        )


def needs_of(recipe: Recipe, plan: Plan) -> Needs:
    """What a run needs, by its settings and the shapes of its models."""
    scratch = recipe.target.scratch is not None
    target = weight_bytes(plan.target, "float32" if scratch else recipe.target.dtype)
    drafter = parameters_of(plan.drafter)
    disk = 1.1 * recipe.corpus.max_bytes
    if not plan.drafter.learns():
        return Needs(target, drafter, disk, target, None)
    distill, train = recipe.distill, recipe.train
    row = distill.row_tokens
    rows = distill.examples * row
    if distill.writer == "given":  # texts make any number of rows; a token has a byte at least
        rows = recipe.corpus.max_bytes
    disk += ROW_TOKEN * rows
    bounds = [distill.max_seconds]
    if plan.drafter.trainable:
        memory, more = _training_needs(recipe, plan, drafter)
        disk += more + feature_bytes(recipe, plan.target, plan.drafter, rows)
        bounds.append(train.max_seconds)
    else:
        memory = collected_bytes(plan.drafter, rows)
        disk += memory
    if (made := recipe.target.scratch) is not None:
        disk += target
        longer = 2 if made.min_tokens is not None and made.max_seconds is not None else 1
        bounds += [made.max_seconds] * longer  # see `Scratch.min_tokens`
    seconds = sum(b for b in bounds if b is not None) if None not in bounds else None
    return Needs(target, drafter, disk, target + memory, seconds)


def _training_needs(recipe: Recipe, plan: Plan, drafter: int) -> tuple[float, float]:
    """Bytes of memory beside the target, and of disk for weights, that training takes."""
    distill, train, config = recipe.distill, recipe.train, plan.drafter.config
    row = distill.row_tokens
    packed = packed_tokens(train, row) / row if train.packing else 1.0  # rows in one of a batch
    features = row * config.hidden_size * max(len(config.feature_layers), 1)
    depths = plan.drafter.train_depths if isinstance(plan.drafter, TrainableDrafter) else 1
    # The states of every depth where tokens are supervised, kept for the backward pass.
    states = depths * min(row, distill.new_tokens) * config.hidden_size
    learned = drafter + adapter_parameters(plan.target, plan.drafter)
    memory = state_bytes(train) * learned + 4 * train.batch_size * packed * (features + states)
    return memory, (STORED + ARTIFACT) * learned


def check_needs(recipe: Recipe, needs: Needs, processes: int = 1) -> None:
    """Raise CheckError where the disk or the memory cannot be enough, whatever happens.

    Memory is judged of one process alone: launchers may divide weights over several.
    """
    folder = recipe.folder.absolute()
    while not os.path.exists(folder):  # which is False of what may not be looked into
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise CheckError(f"{folder} cannot be written to; choose another folder (output=…)")
    free = shutil.disk_usage(folder).free
    if needs.disk > free:
        key = "corpus.max_bytes" if recipe.distill.writer == "given" else "distill.examples"
        said = (
            f"the run may write {size(needs.disk)} into {folder}, which has {size(free)} free; "
            f"make room, choose another folder (output=…), or lower {key}"
        )
        if not any(stage.record for stage in stage_folders(recipe.folder)):
            raise CheckError(said)
        logger.warning("%s", said)  # some of it is there already
    whole = total_memory()
    placed = recipe.target.device_map is not None or recipe.target.tp_plan is not None
    if processes == 1 and not placed and 0 < whole < needs.memory:
        raise CheckError(
            f"the run needs at least {size(needs.memory)} of memory, of which {size(needs.target)} "
            f"are the target's weights, and there are {size(whole)}; lower target.dtype (bfloat16, "
            "4bit), train.batch_size or the drafter's size, or launch several processes with "
            "recipes/launch/zero3.yaml"
        )


def total_memory() -> int:
    """Bytes of the device that a process trains on; 0 where it is not known."""
    return total_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu")) or 0


def size(count: float) -> str:
    """Bytes in a few characters.

    >>> [size(n) for n in (512, 2e6, 13.4e9)]
    ['1 kB', '2.0 MB', '13.4 GB']
    """
    for unit, width in (("GB", 1e9), ("MB", 1e6)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
