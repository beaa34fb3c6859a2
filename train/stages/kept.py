"""What stays of a training: its kept checkpoints, chosen from and continued later."""

from __future__ import annotations

import json
import math
import operator
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from headstart.heads import Drafter
from headstart.heads.artifacts.files import METRICS, WEIGHTS
from headstart.heads.core import gathered
from headstart.heads.core.files import flush_folder

from ..fit.checkpoints import last_checkpoint, step_of
from ..recipe import Train
from .folders import StageError, StageFolder, stage_folders

CHECKPOINTS = "checkpoints"  # in the folder of the stage `train`
_STATE = "trainer_state.json"
# What only a continued training reads; optimizers' states are twice as large as the drafter.
_TO_CONTINUE = (
    "optimizer*", "scheduler*", "scaler*", "rng_state*", "global_step*", "latest",
    "zero_to_fp32.py", "training_args.bin",
)  # fmt: skip


def kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder that hold weights, by step: the best one and the last."""
    found = {step_of(p): p for p in folder.glob("checkpoint-*") if p.is_dir()}
    return {step: found[step] for step in sorted(found) if (found[step] / WEIGHTS).is_file()}


def keep_weights_alone(folder: Path) -> None:
    """Remove from all checkpoints but the last what only a continued training reads."""
    for checkpoint in list(kept_checkpoints(folder).values())[:-1]:
        for pattern in _TO_CONTINUE:
            for path in checkpoint.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def schedule(spec: Train, steps: int) -> dict[str, Any]:
    """What a manifest says of a training's learning rate, and of the steps that it ended at."""
    names = ("learning_rate", "warmup_ratio", "max_steps", "epochs", "max_seconds")
    return {name: getattr(spec, name) for name in names} | {"steps": steps}


def read_drafter(family: type[Drafter], target: PreTrainedModel, checkpoint: Path) -> Drafter:
    """The drafter of a checkpoint, in float32, bound to its target and its adapter in it."""
    drafter: Any = family.from_pretrained(checkpoint, dtype=torch.float32)
    drafter.to(target.device)
    load_weights(drafter.bind(target), target, checkpoint)
    return drafter


def load_weights(drafter: Drafter, target: PreTrainedModel, checkpoint: Path) -> None:
    """Give a drafter, and the adapter of its target, a checkpoint's weights."""
    if drafter.adapter is not None and not drafter.adapter.attached:
        drafter.adapter.attach(target)
    with gathered(*learnt_by(drafter), write=True):
        drafter.load_state_dict(safetensors.torch.load_file(checkpoint / WEIGHTS))
        if drafter.adapter is not None:
            drafter.adapter.load(checkpoint)


def learnt_by(drafter: Drafter) -> list[nn.Module]:
    """What was trained of a drafter and its target, as modules."""
    return [drafter, *(drafter.adapter.factors() if drafter.adapter is not None else [])]


def earlier_training(
    root: Path, settings: dict[str, Any], reads: dict[str, str] | None = None
) -> StageFolder:
    """The finished training of a run that `settings` continue: the longest of fewer steps.

    Args:
        settings: of the stage `train`; all but its bounds must be the same.
        reads: the ids of what it reads; None while they are not known, for any.

    Raises:
        StageError: there is none.
    """
    steps, seconds = settings["train"]["max_steps"], settings["train"]["max_seconds"]

    def unbounded(settings: dict[str, Any]) -> dict[str, Any]:
        bounds = {"max_steps": None, "max_seconds": None, "epochs": None}
        kept = {key: value for key, value in settings.items() if key != "extends"}
        return kept | {"train": kept["train"] | bounds}

    def goes_on(record: dict[str, Any]) -> bool:
        before, info = record["settings"], record["info"]
        allowed = _bounds(before, unlimited=info["seconds"])  # it has taken no more
        return (
            reads in (None, record["reads"])
            and unbounded(before) == unbounded(settings)
            and _bounds(before) != _bounds(settings)
            and all(map(operator.le, allowed, _bounds(settings)))
            and info["steps"] < steps
        )

    folders = stage_folders(root, "train")
    found = [each for each in folders if each.record is not None and goes_on(each.record)]
    if not found:
        within = "" if seconds is None else f" and at most {seconds:g} s"
        raise StageError(
            f"train.extend is true, but {root} holds no finished training of fewer than {steps} "
            f"steps{within} whose other settings are the same; leave train.extend out to train anew"
        )
    return max(found, key=lambda folder: (folder.record or {})["info"]["steps"])


def _bounds(settings: dict[str, Any], unlimited: float = math.inf) -> tuple[float, float, float]:
    """The steps, epochs and seconds that settings of the stage `train` allow.

    Args:
        unlimited: the seconds where they set no limit.
    """
    train = settings["train"]
    return train["max_steps"], train.get("epochs") or math.inf, train["max_seconds"] or unlimited


def check_can_go_on(earlier: StageFolder, spec: Train) -> None:
    """Raise StageError where the time or the epochs of an earlier training leave a longer one none.

    It ended by its epochs where it had steps and time left.
    """
    record = earlier.record or {}
    info, before = record["info"], record["settings"]["train"]
    steps, seconds, limit = info["steps"], info["seconds"], spec.max_seconds
    if limit is not None and seconds >= limit:
        raise StageError(
            f"train.extend: the earlier training took {seconds:.0f} s, and train.max_seconds "
            f"{limit:.0f} bounds both together; raise it, or set it to null"
        )
    by_time = before["max_seconds"] is not None and seconds >= before["max_seconds"]
    by_epochs = spec.epochs is not None and not by_time and steps < before["max_steps"]
    if by_epochs and spec.epochs == before["epochs"]:
        raise StageError(
            f"train.extend: train.epochs {spec.epochs:g} ended the earlier training after {steps} "
            "steps, and would end this one there; raise it"
        )


def continue_from(earlier: Path, folder: Path) -> None:
    """Copy an earlier training's checkpoints and figures, unless `folder` has gone as far."""
    checkpoints, reached = kept_checkpoints(earlier), last_checkpoint(folder)
    # A kill may have left copies of some: only the last one has what training goes on with.
    if reached is not None and step_of(reached) >= max(checkpoints):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if (figures := earlier.parent / METRICS).is_file():
        shutil.copyfile(figures, folder.parent / METRICS)
    for checkpoint in checkpoints.values():  # the last one last
        copy, place = folder / f".{checkpoint.name}", folder / checkpoint.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(checkpoint, copy)
        state = json.loads((copy / _STATE).read_text(encoding="utf-8"))
        if state["best_model_checkpoint"]:  # a path
            best = folder / Path(state["best_model_checkpoint"]).name
            state["best_model_checkpoint"] = str(best)
        (copy / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        flush_folder(copy)
        copy.rename(place)
