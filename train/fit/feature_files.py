"""The target's features of training rows in files, which later epochs and later runs read.

    features/0123456789abcdef/4f/4f3a….bin    a row's features [L, C], and their CRC-32

The folder is named by what decides features but for the text: the target, the layers, the dtype. A
file is named by the hash of its row's tokens, so a row is found by any run over the same text,
whatever its number there, and never taken for another. A file gets its name when it is whole, and
is checked when a process first reads it, so that neither a kill nor a crash leaves wrong features.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.families import with_article

from ..data.training_rows import Rows
from ..data.whole_files import WholeFile
from ..processes.agreement import on_process_0, sum_over_processes
from ..recipe import Recipe

logger = logging.getLogger(__name__)

_CHECK = 4  # bytes of the CRC-32 behind the features
_ABANDONED = 600.0  # seconds after which a temporary file is that of a killed process

Compute = Callable[[Tensor, Tensor | None], Tensor]
"""Tokens [B, T] and their positions [B, T] or None -> the target's features [B, T, C]."""


def check_feature_files(recipe: Recipe, adapted: bool) -> None:
    """Raise OptionError where features on disk are asked for and the target is not one to keep.

    Args:
        adapted: whether the target itself learns, by an adapter.
    """
    asked = f"train.feature_disk_gb is {recipe.train.feature_disk_gb:g}"
    if not recipe.train.feature_disk_gb:
        return
    if adapted:
        raise OptionError(
            f"{asked}, but "
            f"{with_article(recipe.drafter.family)} drafter is trained together with an adapter "
            "of the target, whose features change with every step; set it to 0."
        )
    if recipe.target.tp_plan is not None:
        raise OptionError(
            f"{asked} with target.tp_plan, whose processes compute each row together; set one of "
            "them to its default (0, null)."
        )


@dataclass(frozen=True)
class FeatureFolder:
    """Where features are kept, and how many.

    Attributes:
        root: the folder, which several runs may share.
        limit: bytes of all files in it.
        target: stands for the target as it is now.
    """

    root: Path
    limit: float
    target: str

    def open(
        self, rows: Rows, layers: Sequence[int], width: int, dtype: torch.dtype, together: bool
    ) -> FeatureFiles:
        """The files for rows, as many from the first one on as the limit leaves room for.

        All processes call. Process 0 says what is needed, and removes the oldest files of other
        rows where they leave too little room below the limit.

        Args:
            width: C, numbers for each token.
            together: whether all processes must run the target at the same time.

        Raises:
            OptionError: there is less room on the disk than the features will take.
        """
        what = json.dumps([self.target, list(layers), width, str(dtype)])
        folder = self.root / hashlib.sha256(what.encode()).hexdigest()[:16]
        sizes = rows.lengths * (width * dtype.itemsize) + _CHECK  # [rows], bytes of their files
        count = int(np.searchsorted(sizes.cumsum(), self.limit, "right"))
        files = FeatureFiles(folder, rows, width, dtype, count, together)
        on_process_0(lambda: self._make_room(files, sizes))
        return files

    def _make_room(self, files: FeatureFiles, sizes: np.ndarray) -> None:
        wanted = {files.path(number): int(sizes[number]) for number in range(files.count)}
        there, others = 0, []
        for path in self.root.rglob("*") if self.root.is_dir() else ():
            if not path.is_file():
                continue
            found = path.stat()
            if wanted.get(path) == found.st_size:
                there += found.st_size
            elif path.suffix == ".bin" or time.time() - found.st_mtime > _ABANDONED:
                others.append((found.st_mtime, found.st_size, path))
        needed = sum(wanted.values())
        over, gone = needed + sum(size for _, size, _ in others) - self.limit, []
        for _, size, path in sorted(others):
            if over > 0 or path.suffix != ".bin":
                over -= size
                gone.append((size, path))
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        due = needed - there
        if due > free + sum(size for size, _ in gone):
            raise OptionError(
                f"train.feature_disk_gb keeps {needed / 1e9:.3g} GB of features in {self.root}, "
                f"{due / 1e9:.3g} GB of them new; found {free / 1e9:.3g} GB free; make room, or "
                "lower it."
            )
        for _, path in gone:
            path.unlink(missing_ok=True)
        print(
            f"features: of {files.count:,} of {len(sizes):,} rows {needed / 1e9:.3g} GB are kept "
            f"in {self.root}, {due / 1e9:.3g} GB of them new; {free / 1e9:.3g} GB are free",
            file=sys.stderr,
        )


class FeatureFiles:
    """Reads features of rows from files, and writes those that it has to compute.

    Attributes:
        count: rows whose features are kept, the first ones.
        read, computed: how many rows were, so far, by this process.
    """

    def __init__(
        self, folder: Path, rows: Rows, width: int, dtype: torch.dtype, count: int, together: bool
    ):
        self.folder, self.rows, self.width, self.dtype = folder, rows, width, dtype
        self.count, self.together = count, together
        self.read = self.computed = 0
        self.names: dict[int, str] = {}  # of the rows' files
        self.whole: set[int] = set()  # rows whose files were checked
        self.writes = True

    def features(
        self, rows: Tensor, tokens: Tensor, positions: Tensor | None, compute: Compute
    ) -> Tensor:
        """The features of a batch, zeros in the padding where they are read.  # [B, T, C]

        The target runs on the rows of the batch that lack any.

        Args:
            rows: [B] or [B, S], see `TargetWithDrafter.forward`.
        """
        device = tokens.device
        units = [[n for n in unit if n >= 0] for unit in rows.reshape(len(rows), -1).tolist()]
        found: dict[int, Tensor] = {}
        for number in {number for unit in units for number in unit}:
            if (kept := self._load(number)) is not None:
                found[number] = kept
        missing = [at for at, unit in enumerate(units) if any(n not in found for n in unit)]
        runs = len(missing)
        if self.together:
            runs = int(sum_over_processes([float(runs)], device)[0])
        if len(missing) == len(units):  # as without files
            captured = compute(tokens, positions)
        else:
            shape = *tokens.shape, self.width
            captured = torch.zeros(shape, dtype=self.dtype, device=device)
            if runs:
                chosen = missing or [0]  # other processes need this one's part of the target
                where = None if positions is None else positions[chosen]
                part = compute(tokens[chosen], where)
                if missing:
                    captured[missing] = part.to(self.dtype)
        for at, unit in enumerate(units):
            place = 0
            for number in unit:
                own = captured[at, place : (place := place + int(self.rows.lengths[number]))]
                if at not in missing:
                    own.copy_(found[number])
                elif number < self.count and number not in found:
                    self._keep(number, own.to("cpu", self.dtype))
            self.computed += len(unit) if at in missing else 0
            self.read += len(unit) if at not in missing else 0
        return captured

    def path(self, number: int) -> Path:
        """The file of a row."""
        if number not in self.names:
            tokens = np.ascontiguousarray(self.rows.row(number).tokens, np.int32)
            self.names[number] = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
        name = self.names[number]
        return self.folder / name[:2] / f"{name}.bin"

    def _load(self, number: int) -> Tensor | None:
        """A row's features [L, C], mapped; None where they are not there, or damaged."""
        if number >= self.count:
            return None
        path, length = self.path(number), int(self.rows.lengths[number])
        try:
            data: Any = np.memmap(path, np.uint8, "c")
        except (OSError, ValueError):  # it is not there, or empty
            return None
        size = length * self.width * self.dtype.itemsize
        if len(data) != size + _CHECK or not (
            number in self.whole or zlib.crc32(data[:size]) == int(data[size:].view("<u4")[0])
        ):
            logger.warning("%s is damaged; its row's features are computed again", path)
            return None
        self.whole.add(number)
        return torch.from_numpy(data[:size]).view(self.dtype).view(length, self.width)

    def _keep(self, number: int, features: Tensor) -> None:
        """Write a row's features [L, C]; what is not finite is not kept."""
        if not self.writes or not features.isfinite().all():
            return
        path = self.path(number)
        data: Any = features.contiguous().view(torch.uint8).numpy().reshape(-1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with WholeFile(path) as whole:
                whole.file.write(data)
                whole.file.write(zlib.crc32(data).to_bytes(_CHECK, "little"))
        except OSError as error:
            self.writes = False
            logger.warning("features are not kept any more: %s", error)
