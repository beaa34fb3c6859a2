"""The stage store: every stage of a run writes one folder and is finished when its record exists.

`stage.json` is written last and atomically, and holds the sha256 of every file of the stage, so a
run killed anywhere leaves each stage either finished or unfinished, and a stage that was damaged or
copied in part is found out. Its fingerprint is over the stage's settings and the ids of the results
it reads; a finished stage of that fingerprint is reused, and stages of other settings stay beside
it (see `stage_folders`). Results bounded by time differ from run to run, so each has an id of its
own, and a stage run again does so with all that read it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from headstart.heads.artifacts.manifest import library_versions, sha256
from headstart.heads.core.files import flush_folder, flush_to_disk, write_atomically

from ..processes.agreement import is_process_0, on_process_0, wait_for_all
from .folders import (
    BEGUN,
    RECORD,
    StageError,
    StageFolder,
    folder_name,
    make_current,
    remove,
    stage_folders,
)
from .lock import RunLock

logger = logging.getLogger(__name__)

# Errors of a disk that is full or closed, by number and, of other libraries' errors, by words.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_SAID = re.compile(
    r"\(os error (28|27|122|30)\)|No space left|PytorchStreamWriter|iostream error|unexpected pos"
)
_NOT_RESULTS = {RECORD, BEGUN, "README.md"}  # a model card may be edited


@dataclass(frozen=True)
class Stage:
    """A finished stage."""

    name: str
    folder: Path
    id: str  # this result's own, drawn when the stage finished
    seconds: float  # that it took when it really ran
    info: dict[str, Any]  # what the work returned, JSON
    reused: bool  # it was found finished

    @property
    def plain(self) -> Path:
        """Its folder under the stage's plain name, which stands for the newest."""
        return self.folder.with_name(self.name)


@dataclass
class StageStore:
    """The stages of one run. Process 0 owns the folders; all processes make all calls.

    The run's folder is locked from the first stage on, that of `other` while stages are made in it;
    leaving the store as a context gives them back.
    """

    root: Path  # holds the stages' folders
    fresh: bool = False  # reuse no stage of this run; those that are there stay beside the new ones
    other: Path | None = None  # another run's root, whose stages serve where `run` says `shared`
    finished: dict[str, Stage] = field(default_factory=dict)  # the stages so far, by name
    _locks: dict[Path, RunLock] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def run(
        self,
        name: str,
        settings: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any] | None],
        reads: Sequence[Stage] = (),
        resumable: bool = False,
        shared: bool = False,
        layout: Mapping[str, Any] | None = None,
    ) -> Stage:
        """Return the stage, doing `work(folder)` only where no finished stage matches.

        Args:
            settings: JSON values that decide the result; anything else does not run it again.
            work: fills the folder; what it returns on process 0 (JSON, or None) is recorded.
            reads: the stages this one depends on; if one of them is run again, so is this.
            resumable: every process does the work, and an unfinished folder's files are kept when
                they were begun with the same fingerprint. Else process 0 works in an empty folder.
            shared: the stage may be that of `other`.
            layout: settings that do not decide the result, but how unfinished files of a resumable
                stage are divided; begun with others, they do not serve.
        """
        ids = {stage.name: stage.id for stage in reads}
        parts = json.dumps([dict(settings), ids], sort_keys=True, allow_nan=False)
        fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        begun = {"fingerprint": fingerprint, "layout": dict(layout or {})}
        with _writing(name, self.root):
            folder, found = on_process_0(
                lambda: self._find_or_begin(name, begun, reads, resumable, shared)
            )
            if found is None:
                started = time.perf_counter()
                info = (work(folder) if resumable else on_process_0(lambda: work(folder))) or {}
                seconds = round(time.perf_counter() - started, 3)
                wait_for_all()
                stage = Stage(name, folder, os.urandom(16).hex(), seconds, info, reused=False)
                if is_process_0():
                    _finish(stage, fingerprint=fingerprint, settings=dict(settings), reads=ids)
            else:
                stage = found
            self.finished[name] = on_process_0(lambda: self._make_current(stage))
        return self.finished[name]

    def _find_or_begin(
        self, name: str, begun: dict[str, Any], reads: Sequence[Stage], resumable: bool,
        shared: bool,
    ) -> tuple[Path, Stage | None]:  # fmt: skip
        """The folder of a stage and, if it is finished, the stage; else the folder is prepared."""
        fingerprint = begun["fingerprint"]
        self._lock(self.root)
        root = self._root(name, fingerprint, reads) if shared else self.root
        anew = self.fresh and root == self.root
        for folder in [] if anew else reversed(stage_folders(root, name)):
            if folder.fingerprint == fingerprint and (stage := _finished(folder)) is not None:
                print(f"{name}: finished before, and reused", file=sys.stderr)
                return folder.path, stage
        self._lock(root)
        for number in itertools.count(1):
            path = root / folder_name(name, fingerprint, number)
            folder = StageFolder(path)
            if path.exists():
                finished = folder.record is not None or (path / RECORD).exists()
                if finished or folder.begun not in (begun, {}):
                    continue  # or damaged, or begun otherwise: it stays
                # Without any word of what was begun, a kill came as it was made, or removed.
                if folder.begun and resumable and not anew:
                    logger.info("stage %s: going on in %s", name, path)
                    return path, None
                remove(path)
            path.mkdir(parents=True)
            write_atomically(path / BEGUN, json.dumps(begun).encode())
            return path, None
        raise AssertionError

    def _root(self, name: str, fingerprint: str, reads: Sequence[Stage]) -> Path:
        """`other` where it holds all that the stage reads, and this very stage or none of it."""
        if self.other is None or any(stage.folder.parent != self.other for stage in reads):
            return self.root
        there = [f.fingerprint for f in stage_folders(self.other, name) if f.record is not None]
        return self.other if not there or fingerprint in there else self.root

    def _make_current(self, stage: Stage) -> Stage:
        """Set the plain name, but never that of another run's stage that was found finished."""
        root = stage.folder.parent
        if stage.reused and root != self.root:
            return stage
        folder = make_current(stage.folder, stage.name)
        flush_to_disk(root)
        return Stage(**{**vars(stage), "folder": folder})

    def _lock(self, root: Path) -> None:
        if root not in self._locks:
            self._locks[root] = RunLock(root)

    def seconds(self) -> dict[str, float]:
        """Seconds each stage of this run took when it really ran."""
        return {name: stage.seconds for name, stage in self.finished.items()}


@contextmanager
def _writing(name: str, root: Path) -> Iterator[None]:
    """Raise a StageError that says what to do where the disk is full or closed."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer raises RuntimeError
        reason = " ".join(str(error).split())
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        closed = number in _CLOSED and str(root) in str(file)  # not a file that is read
        if not (closed or number in _FULL or _SAID.search(reason)):
            raise
        raise StageError(
            f"stage {name} cannot be written in {root} ({reason[:160]}); make room there, or "
            "choose another folder (output=…). What is finished stays, and the same command goes on"
        ) from error


def _finish(stage: Stage, **decided_by: Any) -> None:
    """Write the record of a stage whose work is done."""
    for left in stage.folder.rglob(".*.tmp"):  # what a process that was killed had begun
        left.unlink()
    record = {
        "name": stage.name, "id": stage.id, **decided_by, "seconds": stage.seconds,
        "info": stage.info, "finished": time.strftime("%F %T"), "versions": library_versions(),
        "files": _checksums(stage.folder),
    }  # fmt: skip
    flush_folder(stage.folder)  # the record says that its files are whole
    write_atomically(stage.folder / RECORD, json.dumps(record, indent=2, allow_nan=False).encode())


def _finished(folder: StageFolder) -> Stage | None:
    """The stage in a folder; None where it is unfinished or damaged."""
    record = folder.record
    if record is None:
        return None
    found = Stage(folder.name, folder.path, record["id"], record["seconds"], record["info"], True)
    known, files = record.get("files", {}), _checksums(folder.path)  # records once had no files
    if damaged := [name for name in known if files.get(name) != known[name]]:
        logger.warning(
            "stage %s: %s in %s is missing or was changed; the stage is run again",
            found.name, damaged[0], folder.path.name,
        )  # fmt: skip
        return None
    logger.info("stage %s: reused, %s (%.1f s when it ran)", found.name, folder.path, found.seconds)
    return found


def _checksums(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a stage, by its path in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in _NOT_RESULTS)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}
