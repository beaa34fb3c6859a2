"""The stage store: every stage of a run writes one folder and is finished when its record exists.

`stage.json` is written last and atomically, so a run killed anywhere leaves each stage either
finished or absent. The record holds a fingerprint of the stage's settings and of the very results
it reads; a stage whose fingerprint still matches is reused, all others are redone. Results bounded
by time differ from run to run, so each result has an id of its own, and redoing one stage redoes
every stage that reads it.
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

from headstart.heads.artifacts.manifest import library_versions
from headstart.heads.core.files import write_atomically

logger = logging.getLogger(__name__)

RECORD = "stage.json"
_BEGUN = "begun"  # in the folder of a resumable stage: the fingerprint it was begun with


@dataclass(frozen=True)
class Stage:
    """A finished stage.

    `id` is this result's own, drawn when the stage finished; `info` is what the work returned
    (JSON), `seconds` the time it took when it really ran, `reused` whether it was found finished.
    """

    name: str
    folder: Path
    id: str
    seconds: float
    info: dict[str, Any]
    reused: bool


@dataclass
class StageStore:
    """The stages of one run, in `root`.

    ```python
    store = StageStore(Path("runs/quickstart"))
    corpus = store.run("corpus", {"source": "stdlib"}, write_corpus)
    target = store.run("target", {"layers": 12}, train, reads=[corpus])
    ```
    """

    root: Path
    fresh: bool = False
    finished: dict[str, Stage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Only folders that are stages of ours: `root` is a path that a user chose.
        for folder in list(self.root.glob("*/")) if self.fresh else []:
            if (folder / RECORD).exists() or (folder / _BEGUN).exists():
                _remove(folder)

    def run(
        self,
        name: str,
        settings: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any] | None],
        reads: Sequence[Stage] = (),
        resumable: bool = False,
    ) -> Stage:
        """Return the stage, doing `work(folder)` only where no finished stage matches.

        settings: JSON values that decide the result; what is not in them does not redo a stage.
        work: fills the folder, and returns what is worth recording (JSON), or None.
        reads: the stages this one depends on; if one of them is redone, so is this.
        resumable: keep an unfinished folder's files when they were begun with the same
            fingerprint, so that the work can go on where it was killed.
        """
        folder = self.root / name
        fingerprint = chain(settings, reads)
        record = _read(folder / RECORD)
        if record is not None and record.get("fingerprint") == fingerprint:
            stage = Stage(name, folder, record["id"], record["seconds"], record["info"], True)
            logger.info("stage %s: reused, %s (%.1f s when it ran)", name, folder, stage.seconds)
        else:
            _clear(folder, fingerprint, keep=resumable)
            started = time.perf_counter()
            info = work(folder) or {}
            seconds = time.perf_counter() - started
            record = {
                "name": name,
                "id": os.urandom(16).hex(),
                "fingerprint": fingerprint,
                "settings": dict(settings),
                "reads": {stage.name: stage.id for stage in reads},
                "seconds": round(seconds, 3),
                "info": info,
                "versions": library_versions(),
            }
            write_atomically(folder / RECORD, _json(record, indent=2).encode())
            stage = Stage(name, folder, record["id"], record["seconds"], info, False)
        self.finished[name] = stage
        return stage

    def keeps(self, name: str, settings: Mapping[str, Any], reads: Sequence[Stage] = ()) -> bool:
        """Whether `run` would overwrite nothing: the stage is unfinished, or would be reused."""
        record = _read(self.root / name / RECORD)
        return record is None or record.get("fingerprint") == chain(settings, reads)

    def seconds(self) -> dict[str, float]:
        """Seconds each stage of this run took when it really ran."""
        return {name: stage.seconds for name, stage in self.finished.items()}


def chain(settings: Mapping[str, Any], reads: Sequence[Stage] = ()) -> str:
    """A stage's fingerprint: sha256 over its settings and the ids of the results it reads."""
    parts = [dict(settings), {stage.name: stage.id for stage in reads}]
    return hashlib.sha256(_json(parts, sort_keys=True).encode()).hexdigest()


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


def _json(value: Any, **how: Any) -> str:
    return json.dumps(value, allow_nan=False, **how)
