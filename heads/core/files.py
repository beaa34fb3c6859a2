"""Writing files that survive a crash."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import brief

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None

_BLOCK = 1 << 16  # bytes that are read at once where the end of a line is looked for


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write bytes or UTF-8 text so that a reader finds the old content or all of the new.

    That holds after a crash, and after an `OSError`. Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)


def append_line(path: Path, line: str | None) -> None:
    """Append a line of JSON to a file that its owner alone may read, whole or not at all.

    Without a line the file is made, if it is not there.

    Threads and processes may append to the same file: a lock of the system orders them. What a
    killed one has left of a line is removed by the next; a whole line without its end gets it.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        end = _mended(file)
        due = memoryview(b"" if line is None else f"{line}\n".encode())
        try:
            while due:
                due = due[os.write(file, due) :]
        except OSError:
            os.ftruncate(file, end)
            raise
    finally:
        os.close(file)


def _mended(file: int) -> int:
    """Give the last line of a file its end, or remove what is left of it; the size afterwards."""
    size = start = os.fstat(file).st_size
    tail = b""
    while start and b"\n" not in tail:
        first = max(start - _BLOCK, 0)
        tail = os.pread(file, start - first, first) + tail
        start = first
    tail = tail.rpartition(b"\n")[2]
    if not tail:
        return size
    try:
        json.loads(tail)
    except ValueError:
        os.ftruncate(file, size - len(tail))
        return size - len(tail)
    os.write(file, b"\n")
    return size + 1


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds a file's content, or a folder's list of names."""
    if path.is_dir() and os.name != "posix":
        return  # only there can a folder be opened
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Wait until the disk holds a folder and all below it.

    Whoever may read the folder may read its weights afterwards, which safetensors writes so that
    the owner alone may.
    """
    for path in (*folder.rglob("*"), folder):
        if path.suffix == ".safetensors" and not path.is_symlink():
            with contextlib.suppress(PermissionError):  # the file system has no permissions
                path.chmod(path.parent.stat().st_mode & 0o666)
        flush_to_disk(path)


class _NotSaved(OSError):
    """What `writing` raises; an outer one names its own folder and the same reason."""


@contextmanager
def writing(what: str, folder: Path, remedy: str = "") -> Iterator[None]:
    """Raise an OSError of one line that names the folder and what to do where it cannot be written.

    Args:
        what: such as `the plan`.
        remedy: in place of making room or choosing another folder.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.__cause__ or error) if isinstance(error, _NotSaved) else error
        raise _NotSaved(
            f"{what} cannot be saved in {folder} ({brief(reason, None)}); what stood there is "
            f"untouched: {remedy or 'make room, or choose a folder that can be written to'}."
        ) from error


@contextmanager
def new_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which gets the name `folder` when all is written.

    After an error there is nothing; an OSError names the folder. `folder` is empty, or does not
    exist.
    """
    with writing(what, folder), _new_folder(folder) as new:
        yield new


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    new = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        flush_folder(new)
        if folder.is_dir():
            folder.rmdir()
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
