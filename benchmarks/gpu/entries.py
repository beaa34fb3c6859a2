"""The files of the suite's parts, each entry on disk as soon as it is known."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from headstart.heads.core.files import write_atomically
from headstart.reports.tables import to_json
from headstart.terminal import one_line

from .paths import watched_paths


class Entries:
    """One part's entries, on disk as soon as they are known.

    Args:
        conditions: what an entry must have been measured with to count. Each entry says by itself
            which driver it was measured with, since machines that are lent differ in it.
    """

    def __init__(self, path: Path, part: str, conditions: dict[str, Any], fresh: bool):
        self.path, self._part, self._conditions, self._fresh = path, part, conditions, fresh
        self.file = self._found()
        self.errors: dict[str, str] = {}

    def _found(self) -> dict[str, Any]:
        """What is on disk of these conditions."""
        found = None if self._fresh else read_part(self.path)
        if found is None or not _alike(found["conditions"], self._conditions):
            found = {"part": self._part, "commands": [], "entries": {}}
        return {**found, "conditions": self._conditions}

    def missing(self, name: str) -> bool:
        """Whether an entry is still to be measured."""
        return "error" in self.file["entries"].get(name, {"error": ""})

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do the work of an entry that is missing; the others go on when it fails."""
        if not self.missing(name):
            print(f"  {name}: found in {self.path}", file=sys.stderr)
            return
        print(f"  {name}", file=sys.stderr)
        begun = time.perf_counter()
        try:
            with watched_paths() as paths:
                entry = work()
            paths.check()
            entry = {**entry, **paths.to_dict()}
        except Exception as error:
            if os.environ.get("HEADSTART_DEBUG") == "1":
                traceback.print_exc()
            entry = {"error": f"{type(error).__name__}: {one_line(error)}"}
            self.errors[name] = entry["error"]
            print(f"  {name} failed: {entry['error']}", file=sys.stderr)
        gc.collect()  # a model of the last entry must not stand beside the next one's
        seconds = round(time.perf_counter() - begun, 1)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        if driver := self._conditions.get("driver"):
            entry = {**entry, "driver": driver}
        self._add(name, {**entry, "seconds": seconds, "at": when})

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        """Write an entry beside those on disk, to which other processes may have added theirs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            self.file, self._fresh = self._found(), False
            self.file["entries"][name] = entry
            command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
            if command not in self.file["commands"]:
                self.file["commands"].append(command)
            write_json(self.path, self.file)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether conditions differ in nothing but the driver."""
    return {**one, "driver": None} == {**other, "driver": None}


def read_part(path: Path) -> dict[str, Any] | None:
    """A part's file; None where there is none, or it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_json(path: Path, document: Any) -> None:
    """Write a file that a reader sees whole or not at all."""
    write_atomically(path, (to_json(document) + "\n").encode())
