"""The lock of a run's folder: one process owns it at a time, and a dead one does not keep it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None

LOCK = "run.lock"

_held: set[Path] = set()  # by this process, for which a record lock is no obstacle


class RunInUseError(ValueError):
    """Another run owns the folder; the message names it."""


class RunLock:
    """Owns a run's folder from its making to `release`, or to the end of the process.

    The lock is the system's, on the file `run.lock`, which names the holder: host, process and
    since when. It ends with its process however that ends; workers that were forked do not keep it.
    Where the file system has no locks, a holder counts as alive while its host runs a process of
    its number; of another host nothing is known, and the message says which file to remove.

    Raises:
        RunInUseError: another process, or another run in this one, owns the folder.
    """

    def __init__(self, root: Path):
        root.mkdir(parents=True, exist_ok=True)
        self.path = (root / LOCK).resolve()
        if self.path in _held:
            raise self._in_use("this process", "")
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%F %T"),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(holder).encode(), 0)
        _held.add(self.path)

    def _take(self) -> None:
        holder = read_holder(self._file)
        if fcntl is not None:
            try:
                return fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise self._in_use(*_words(holder)) from None
            except OSError:
                pass  # the file system has no locks
        if holder and alive(holder):
            who, remedy = _words(holder)
            if holder.get("host") != socket.gethostname():
                remedy = f" (if that run has ended, remove {self.path})"
            raise self._in_use(who, remedy)

    def _in_use(self, who: str, remedy: str) -> RunInUseError:
        return RunInUseError(
            f"{self.path.parent} is in use by {who}; wait for it, or give this run another name "
            f"(name=…){remedy}"
        )

    def release(self) -> None:
        """Let others have the folder."""
        if self.path in _held:
            _held.discard(self.path)
            os.ftruncate(self._file, 0)
            os.close(self._file)  # the lock goes with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def holder_of(root: Path) -> str:
    """Who owns a run's folder now, in words; empty where nobody does."""
    path = (root / LOCK).resolve()
    if path in _held:  # closing another handle of the file would end our lock
        return "this process"
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # none, or not ours to lock
        return ""
    holder = read_holder(file)
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
    except (BlockingIOError, PermissionError):
        return _words(holder)[0]
    except OSError:
        pass
    finally:
        os.close(file)
    return _words(holder)[0] if holder and alive(holder) else ""


def read_holder(file: int) -> dict[str, Any]:
    """The holder that an open lock file names; empty where it names none."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def alive(holder: dict[str, Any]) -> bool:
    """Whether a holder may still be running: so it is while its host is another one."""
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(holder["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:  # another user's
        return True
    return int(holder["pid"]) != os.getpid()


def _words(holder: dict[str, Any]) -> tuple[str, str]:
    if not holder:
        return "another process", ""
    known = {name: holder.get(name, "?") for name in ("pid", "host", "started")}
    return "process {pid} on {host}, since {started}".format(**known), ""
