"""Checkpoints of a training run: when one is whole, and what a run that goes on from it must share.

`complete.json` is written last, after the disk holds all other files, and says how the run was
spread. With other processes or batches the rows would be dealt out otherwise from there on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headstart.heads import OptionError
from headstart.heads.core.files import write_atomically

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Spread:
    """How a run is spread over processes, and its batch."""

    engine: str  # what shards its state, see `Engine.kind`
    processes: int
    batch_size: int  # rows a process and forward
    gradient_accumulation: int


@dataclass(frozen=True)
class Reached:
    """How far a run was when a checkpoint was written."""

    seconds: float = 0.0
    loss: float = 0.0  # the sum of all steps' losses
    prepared: float | None = None  # seconds before the first step; None before it
    # steps and seconds before the first step of a joint training's second stage; None before it
    began: Sequence[float] | None = None
    evaluation: dict[str, Any] | None = None  # the settings that measured its validations


def finish_checkpoint(folder: Path, spread: Spread, reached: Reached) -> None:
    """Declare a checkpoint whole, whose files the disk holds; see `flush_folder`."""
    text = json.dumps(asdict(spread) | asdict(reached))
    write_atomically(folder / COMPLETE, text.encode())


def keep_only(folder: Path, kept: Iterable[Path]) -> None:
    """Remove all checkpoints in a folder but some."""
    names = {path.name for path in kept}
    for path in folder.glob("checkpoint-*/"):
        if path.name not in names:
            (path / COMPLETE).unlink(missing_ok=True)  # first: what is left of it is not whole
            shutil.rmtree(path)


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written whole, in the order of their steps."""
    whole = [file.parent for file in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(whole, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written whole, or None."""
    return next(reversed(whole_checkpoints(folder)), None)


def read_checkpoint(folder: Path, spread: Spread) -> Reached:
    """How far a checkpoint is.

    Raises:
        OptionError: it was written by a run that was spread otherwise.
    """
    found: dict[str, Any] = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    own = asdict(spread)
    if wrong := [name for name in own if found[name] != own[name]]:
        name = wrong[0]
        raise OptionError(
            f"{folder} was written with {name.replace('_', ' ')} {found[name]}, and this run has "
            f"{own[name]}, which would change its result; go on with {found[name]}, or start the "
            "training anew with --fresh or by removing that folder."
        )
    names = [field.name for field in fields(Reached)]
    return Reached(**{name: found[name] for name in names if name in found})
