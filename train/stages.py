"""The stage store: every stage of a run writes one folder and is finished when its record exists.

`stage.json` is written last and atomically, and holds the sha256 of every file of the stage, so a
run killed anywhere leaves each stage either finished or unfinished, and a stage that was damaged or
copied in part is found out. Its fingerprint is over the stage's settings and the ids of the results
it reads; a stage whose fingerprint still matches is reused. Results bounded by time differ from run
to run, so each has an id of its own, and a stage run again does so with all that read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.artifacts.manifest import library_versions, sha256
from headstart.heads.core.files import write_atomically

from .processes import from_process_0, is_process_0, wait_for_all

logger = logging.getLogger(__name__)

RECORD = "stage.json"
_BEGUN = "begun"  # in the folder of a resumable stage: the fingerprint it was begun with
_NOT_RESULTS = {RECORD, _BEGUN, "README.md"}  # a model card may be edited


@dataclass(frozen=True)
class Stage:
    """A finished stage."""

    name: str
    folder: Path
    id: str  # this result's own, drawn when the stage finished
    seconds: float  # that it took when it really ran
    info: dict[str, Any]  # what the work returned, JSON
    reused: bool  # it was found finished


@dataclass
class StageStore:
    """The stages of one run. Process 0 owns the folders; all processes make all calls."""

    root: Path  # holds the stages' folders
    fresh: bool = False  # remove the stages that are there
    other: Path | None = None  # another run's root, whose stages serve where `run` says `shared`
    finished: dict[str, Stage] = field(default_factory=dict)  # the stages so far, by name

    def __post_init__(self) -> None:
        # Only folders that are stages of ours: `root` is a path that a user chose.
        for folder in list(self.root.glob("*/")) if self.fresh and is_process_0() else []:
            if (folder / RECORD).exists() or (folder / _BEGUN).exists():
                _remove(folder)

    def run(
        self,
        name: str,
        settings: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any] | None],
        reads: Sequence[Stage] = (),
        resumable: bool = False,
        shared: bool = False,
    ) -> Stage:
        """Return the stage, doing `work(folder)` only where no finished stage matches.

        Args:
            settings: JSON values that decide the result; anything else does not run it again.
            work: fills the folder; what it returns on process 0 (JSON, or None) is recorded.
            reads: the stages this one depends on; if one of them is run again, so is this.
            resumable: every process does the work, and an unfinished folder's files are kept when
                they were begun with the same fingerprint. Else process 0 works in an empty folder.
            shared: the stage may be that of `other`.
        """
        ids = {stage.name: stage.id for stage in reads}
        parts = json.dumps([dict(settings), ids], sort_keys=True, allow_nan=False)
        fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        folder, stage = self.root / name, None
        if is_process_0():
            if shared:
                folder = self._shared_root(name, fingerprint, reads) / name
            stage = _find(folder, fingerprint)
            if stage is None:
                _clear(folder, fingerprint, keep=resumable)
        folder, stage = from_process_0((folder, stage))
        if stage is None:
            started = time.perf_counter()
            info = (work(folder) or {}) if resumable or is_process_0() else {}
            seconds = round(time.perf_counter() - started, 3)
            wait_for_all()
            stage = Stage(name, folder, os.urandom(16).hex(), seconds, info, reused=False)
            if is_process_0():
                record = {
                    "name": name, "id": stage.id, "fingerprint": fingerprint,
                    "settings": dict(settings), "reads": ids, "seconds": seconds, "info": info,
                    "versions": library_versions(), "files": _checksums(folder),
                }  # fmt: skip
                text = json.dumps(record, indent=2, allow_nan=False)
                write_atomically(folder / RECORD, text.encode())
            stage = from_process_0(stage)
        self.finished[name] = stage
        return stage

    def _shared_root(self, name: str, fingerprint: str, reads: Sequence[Stage]) -> Path:
        """`other` where it holds all that the stage reads and, if finished, this very stage."""
        if self.other is None or any(stage.folder.parent != self.other for stage in reads):
            return self.root
        record = _read(self.other / name / RECORD)
        same = record is None or record.get("fingerprint") == fingerprint
        return self.other if same else self.root

    def seconds(self) -> dict[str, float]:
        """Seconds each stage of this run took when it really ran."""
        return {name: stage.seconds for name, stage in self.finished.items()}


def _find(folder: Path, fingerprint: str) -> Stage | None:
    """The finished stage in a folder; None where it has another fingerprint, or is damaged."""
    record = _read(folder / RECORD)
    if record is None or record.get("fingerprint") != fingerprint:
        return None
    stage = Stage(folder.name, folder, record["id"], record["seconds"], record["info"], True)
    known, found = record.get("files", {}), _checksums(folder)  # records once had no files
    if damaged := [name for name in known if found.get(name) != known[name]]:
        logger.warning(
            "stage %s: %s is missing or was changed; the stage is run again", stage.name, damaged[0]
        )
        return None
    logger.info("stage %s: reused, %s (%.1f s when it ran)", stage.name, folder, stage.seconds)
    return stage


def _checksums(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a stage, by its path in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in _NOT_RESULTS)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _clear(folder: Path, fingerprint: str, keep: bool) -> None:
    """Empty a stage's folder, except the unfinished work of the very same stage."""
    begun = folder / _BEGUN
    if not (keep and begun.exists() and begun.read_text() == fingerprint):
        _remove(folder)
        folder.mkdir(parents=True)
        if keep:
            write_atomically(begun, fingerprint.encode())


def _remove(folder: Path) -> None:
    if folder.exists():
        # The records go first: a kill half way must not leave a finished stage without its files.
        (folder / RECORD).unlink(missing_ok=True)
        (folder / _BEGUN).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
