"""The parts of the suite, and what the command line asks of them."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.inputs import find_device
from headstart.terminal import UsageError

from .scale import SCALES, Scale

if TYPE_CHECKING:
    import torch

PARTS = {
    "bandwidth": "how fast the device copies its own memory",
    "heads": "target, its text and a drafter of every family, trained here",
    "acceptance": "what the trained drafters have accepted, round by round",
    "identity": "greedy text in float32 against `generate`, by family",
    "baselines": "trees and chains against `generate`, its assistant and its prompt lookup",
    "batches": "batches against plain decoding of the same batch, with the planner's trees",
    "costs-1b": "plain tokens, trees and rounds at a 1 B shape, random weights",
    "costs-8b": "the same at an 8 B shape",
    "batches-8b": "the planner's costs at the 8 B shape, by batch",
    "report": "table, plots and thresholds from the files of the other parts",
}
"""Every part in the order of a whole run."""

UNTIMED = ("heads", "acceptance", "identity")
"""The parts whose figures are no times, so that families can be measured at once."""


@dataclass(frozen=True)
class Job:
    """What is measured, on what, and where it goes.

    Attributes:
        parts: in the order of a whole run.
        families: of the drafters.
        trained: the folder of the runs that train target and drafters.
        corpus: the text in place of the recipe's; None for that one.
        jobs: families that are measured at once in the parts `UNTIMED`.
        here: measure all of them in this process.
        vocabulary: time the drafters with so many of the tokens, too, in the parts of costs.
    """

    parts: tuple[str, ...]
    device: str
    size: str
    folder: Path
    trained: Path
    families: tuple[str, ...]
    corpus: str | None = None
    fresh: bool = False
    jobs: int = 1
    here: bool = False
    vocabulary: int | None = None

    @property
    def apart(self) -> bool:
        """Whether each family is measured by a process of its own.

        An error on a GPU that ends one process's work there then costs the other families nothing.
        """
        return self.device == "cuda" and len(self.families) > 1 and not self.here

    @property
    def scale(self) -> Scale:
        """How large everything is."""
        return SCALES[self.size]

    @functools.cached_property
    def on(self) -> torch.device:
        """The device."""
        import torch

        return torch.device(self.device)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The models' dtype."""
        import torch

        return getattr(torch, self.scale.dtype)


def make_job(
    parts: Collection[str] | None = None,
    device: str | None = None,
    size: str | None = None,
    output: Path | None = None,
    trained: Path | None = None,
    families: Collection[str] | None = None,
    corpus: str | None = None,
    fresh: bool = False,
    jobs: int = 1,
    here: bool = False,
    vocabulary: int | None = None,
) -> Job:
    """Check what the command line says; None takes the default.

    Raises:
        UsageError: an unknown part or family, no job, or a GPU that is not there.
    """
    from headstart.heads import FAMILIES

    chosen = _known("--part", parts, PARTS)
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: expected 1 or more")
    if vocabulary is not None and vocabulary < 1:
        raise UsageError(f"--vocabulary {vocabulary}: expected 1 or more")
    if here and jobs > 1:
        raise UsageError(
            f"--jobs {jobs} with --here: one process measures one family at a time; leave one out"
        )
    if device == "cpu":
        # Training takes a GPU wherever it sees one; torch has not looked yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = find_device(device).type
    size = size or ("full" if device == "cuda" else "toy")
    folder = output or Path("runs/suite-gpu")
    return Job(
        parts=tuple(part for part in PARTS if part in chosen),
        device=device,
        size=size,
        folder=folder,
        trained=trained or folder / "trained",
        families=_known("--family", families, FAMILIES),
        corpus=corpus,
        fresh=fresh,
        jobs=jobs,
        here=here,
        vocabulary=vocabulary,
    )


def _known(option: str, names: Collection[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """The names that an option gives, or all that are known."""
    for name in names or ():
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise UsageError(f"{option} {name!r}{meant}; expected one of {', '.join(known)}")
    return tuple(names or known)
