"""Writing files that survive a crash."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import brief


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


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds a file's content, or a folder's list of names."""
    if path.is_dir() and os.name != "posix":
        return  # only there can a folder be opened
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        for path in (*new.rglob("*"), new):
            flush_to_disk(path)
        if folder.is_dir():
            folder.rmdir()
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
