"""Text that is written in rounds, each sped up by a drafter trained on the rounds before it.

    round 1    shards 1 … n        written by the target alone, or with `distill.drafter`
               a drafter learns from them, for `distill.round_steps`
    round 2    shards n + 1 … 2n   written with that drafter, where it is faster
               it learns on, from all shards so far
    …

The rows are the target's own text all the same, so rounds decide nothing but how long it takes:
the stage `train` begins anew, from all of them.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from headstart.heads import OptionError
from headstart.heads.artifacts.files import MANIFEST
from headstart.heads.artifacts.manifest import read_manifest

from .data.distill import ROUNDS, Pace
from .data.training_rows import Rows
from .drafter_stage import Loaded, choose, train_drafter, write_drafter
from .fit.warm_start import going_on
from .processes.agreement import from_process_0, is_process_0, on_process_0, wait_for_all
from .processes.engine import under_fsdp
from .recipe import Distill, Recipe

logger = logging.getLogger(__name__)

_DRAFTER, _TRAINING = "drafter", "training"  # folders of a round


def write_in_rounds(
    recipe: Recipe,
    args: TrainingArguments,
    loaded: Callable[[], Loaded],
    write: Callable[[Distill, range, Path], Pace],
    folder: Path,
) -> Pace:
    """Write all shards, in `distill.rounds`; a killed run goes on with the round that it was in.

    All processes must call it. A round's training that was cut short is begun anew, so that any
    number of processes may go on with it.

    Args:
        args: of the run's training, which are left as they are.
        loaded: the target and what a drafter is judged by.
        write: writes those of some shards that are missing, given the settings, the shards, and a
            folder for the choice of the drafter.
        folder: of the stage.

    Raises:
        OptionError: the target's weights are spread over the processes.
    """
    spec = recipe.distill
    if args.deepspeed is not None or under_fsdp(os.environ):
        raise OptionError(
            f"distill.rounds is {spec.rounds}, and between rounds a drafter is trained in the "
            "processes that write, which DeepSpeed and FSDP cannot; launch it by ddp, with one "
            "process, or set distill.rounds=1."
        )
    limit = None if spec.max_seconds is None else spec.max_seconds / spec.rounds
    pace, drafter = Pace(0, 0.0), None
    for number in range(spec.rounds):
        place = folder / ROUNDS / f"{number + 1}"
        if number:
            drafter = _trained(recipe, args, loaded, folder, place, drafter)
        named = spec.drafter if drafter is None else str(drafter)
        shards = range(
            spec.shards * number // spec.rounds, spec.shards * (number + 1) // spec.rounds
        )
        found = write(replace(spec, drafter=named, max_seconds=limit), shards, place)
        pace = Pace(pace.tokens + found.tokens, pace.seconds + found.seconds)
        wait_for_all()
    if drafter is not None and is_process_0():
        shutil.rmtree(drafter)
    return pace


def _trained(
    recipe: Recipe,
    args: TrainingArguments,
    loaded: Callable[[], Loaded],
    folder: Path,
    place: Path,
    before: Path | None,
) -> Path:
    """The drafter of a round, which goes on from that of the round before, where one is like it."""
    made, training = place / _DRAFTER, place / _TRAINING
    if not from_process_0((made / MANIFEST).is_file() if is_process_0() else None):
        on_process_0(lambda: shutil.rmtree(training, ignore_errors=True))
        spec, rows = recipe.distill, Rows.load(folder)
        steps = spec.round_steps or max(recipe.train.max_steps // spec.rounds, 1)
        epochs = None
        if spec.round_steps is None and recipe.train.epochs is not None:
            epochs = recipe.train.epochs / spec.rounds
        drafter, first = recipe.drafter, recipe.train.from_
        if before is not None and _of_recipe(before, recipe):
            drafter, first = going_on(drafter, str(before))
        train = replace(
            recipe.train, max_steps=steps, epochs=epochs, eval_every=None, extend=False,
            from_=first,
        )  # fmt: skip
        short, own = replace(recipe, train=train, drafter=drafter), copy.copy(args)
        own.max_steps, own.eval_steps, own.save_steps = steps, steps, steps
        own.logging_steps = max(steps // 4, 1)
        own.report_to = []
        logger.info("distill: a drafter learns from %d rows for %d steps at most", len(rows), steps)
        judged = loaded()
        trained, report = train_drafter(short, own, judged, rows, training)
        trained, measured = choose(short, judged, trained, training, report)
        write_drafter(short, judged, trained, measured, made)
        wait_for_all()
    if is_process_0():
        shutil.rmtree(training, ignore_errors=True)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
    return made


def _of_recipe(before: Path, recipe: Recipe) -> bool:
    """Whether a round's drafter has the recipe's settings, which may be others than before a kill.

    They decide nothing of the rows, so the run goes on; but no drafter of other settings does.
    """
    made, own = read_manifest(before).recipe["drafter"], recipe.to_dict()["drafter"]
    changed = {"model", "layers"} if own["options"].get("lora") is not None else set()

    def settings(drafter: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in drafter["options"].items() if name not in changed}
        return drafter | {"options": kept}

    return settings(made) == settings(own)
