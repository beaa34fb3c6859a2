"""The folders of a run's stages, as they stand on disk; nothing here imports torch.

    runs/quickstart/
      heads              a link to the newest of
      heads-1a2b3c4d/    a finished stage, named by its fingerprint: it has a `stage.json`
      heads-5e6f7a8b/    one of other settings; a run never removes it
      heads-5e6f7a8b-2/  one of the same settings, made again
      distill-9c0d1e2f/  an unfinished one: it has `begun` alone
      run.lock           who owns the folder

A folder is never moved or changed once it is finished, so what was made from it still finds it.
Where there are no links the newest stands under the plain name itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

RECORD = "stage.json"  # written last: the stage is finished
BEGUN = "begun"  # written first: the fingerprint of what is made here
_LENGTH = 8  # characters of the fingerprint in a folder's name


class StageError(ValueError):
    """Stages that cannot be made, found or removed as asked."""


@dataclass(frozen=True)
class StageFolder:
    """A folder of a stage, finished or not."""

    path: Path

    @property
    def name(self) -> str:
        """The stage's: `heads` of `heads-1a2b3c4d-2`."""
        found = re.fullmatch(rf"(.+?)(-[0-9a-f]{{{_LENGTH}}}(-\d+)?)?", self.path.name)
        assert found is not None
        return found[1]

    @property
    def number(self) -> int:
        """How often its settings had been run before it, from 1."""
        found = re.fullmatch(rf".+-[0-9a-f]{{{_LENGTH}}}-(\d+)", self.path.name)
        return int(found[1]) if found else 1

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """What `stage.json` says; None of an unfinished stage."""
        return read_record(self.path / RECORD)

    @cached_property
    def begun(self) -> dict[str, Any]:
        """The `fingerprint` and the `layout` that it was begun with."""
        found = read_record(self.path / BEGUN)
        if found is None and (self.path / BEGUN).is_file():  # it was once the fingerprint alone
            found = {"fingerprint": (self.path / BEGUN).read_text(encoding="utf-8").strip()}
        return found or {}

    @property
    def fingerprint(self) -> str:
        """Of the settings and of what the stage reads."""
        return str((self.record or self.begun).get("fingerprint", ""))

    @property
    def current(self) -> bool:
        """Whether it is what the stage's plain name stands for."""
        plain = self.path.with_name(self.name)
        return plain == self.path or (plain.is_symlink() and os.readlink(plain) == self.path.name)

    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.lstat().st_size for file in self.path.rglob("*") if file.is_file())


def folder_name(name: str, fingerprint: str, number: int = 1) -> str:
    """The name of a stage's folder; `number` counts those of the same settings.

    >>> folder_name("heads", "1a2b3c4d5e"), folder_name("heads", "1a2b3c4d5e", 2)
    ('heads-1a2b3c4d', 'heads-1a2b3c4d-2')
    """
    return f"{name}-{fingerprint[:_LENGTH]}" + (f"-{number}" if number > 1 else "")


def stage_folders(root: Path, name: str | None = None) -> list[StageFolder]:
    """The folders of a run's stages, or of one of them, the newest of the same settings last."""
    folders = [StageFolder(p) for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    ours = [
        folder
        for folder in folders
        if not folder.path.is_symlink()
        and not folder.path.name.startswith(".")
        and name in (None, folder.name)
        and ((folder.path / RECORD).is_file() or (folder.path / BEGUN).is_file())
    ]
    return sorted(ours, key=lambda f: (f.name, f.fingerprint, f.number))


def make_current(folder: Path, name: str) -> Path:
    """Let the plain name stand for a finished stage's folder; returns where the stage now is.

    A kill at any moment leaves every stage whole, and the plain name at the old or the new one, but
    for a moment where it was a folder itself, or where there are no links; `make_current` of the
    next run then sets it.
    """
    plain = folder.with_name(name)
    if plain == folder or (plain.is_symlink() and os.readlink(plain) == folder.name):
        return folder
    if plain.is_dir() and not plain.is_symlink():
        _step_aside(plain)
    link = plain.with_name(f".{name}.link")
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(folder.name, target_is_directory=True)
    except (OSError, NotImplementedError):  # a file system without links
        return folder.rename(plain)
    os.replace(link, plain)
    return folder


def _step_aside(plain: Path) -> None:
    """Rename a stage that stands under its plain name."""
    found = StageFolder(plain)
    if found.record is None and not found.begun:
        raise StageError(
            f"{plain} is in the way: it is no stage of a run; move it, or choose another name"
        )
    fingerprint, number = found.fingerprint, 1
    while (aside := plain.with_name(folder_name(plain.name, fingerprint, number))).exists():
        number += 1
    plain.rename(aside)


def remove(folder: Path) -> None:
    """Remove a stage; a kill half way does not leave a finished stage without its files."""
    (folder / RECORD).unlink(missing_ok=True)
    (folder / BEGUN).unlink(missing_ok=True)
    shutil.rmtree(folder)


def removable(root: Path, patterns: Sequence[str]) -> list[StageFolder]:
    """The folders that `patterns`, names or shell patterns of them, name for removal.

    Patterns leave out what a plain name stands for. Raises StageError where nothing has a name, or
    it is a plain name's, or a finished stage that stays has been made for that target.
    """
    folders = stage_folders(root)
    chosen: list[StageFolder] = []
    for pattern in patterns:
        found = [f for f in folders if fnmatch(f.path.name, pattern)]
        if len(found) == 1 and found[0].current and found[0].path.name == pattern:
            raise StageError(
                f"{pattern} is the newest {found[0].name} of {root.name}, and stays; run other "
                f"settings first, or remove the whole folder {root}"
            )
        found = [folder for folder in found if not folder.current]
        if not found:
            others = ", ".join(f.path.name for f in folders if not f.current)
            raise StageError(
                f"{root} has no stage {pattern!r} to remove; "
                + (f"expected one of: {others}" if others else "the run uses all of its stages")
            )
        chosen += [folder for folder in found if folder not in chosen]
    going = {folder.record["id"]: folder for folder in chosen if folder.record}
    for folder in folders:
        target = ((folder.record or {}).get("reads") or {}).get("target")
        if folder.name == "heads" and folder not in chosen and target in going:
            raise StageError(
                f"{folder.path.name} drafts for the target in {going[target].path.name}, which "
                "therefore stays; remove both, or neither"
            )
    return chosen


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON object of a file; None where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None
