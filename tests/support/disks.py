"""Disks that are full, and folders that are closed."""

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Nobody may write there, the superuser included: it becomes somebody else meanwhile.

    Paths are relative to `within`, by default the folder itself.
    """
    mode, here, user = stat.S_IMODE(folder.stat().st_mode), Path.cwd(), os.geteuid()
    os.chdir(within or folder)  # what is above may not be readable to somebody else
    folder.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        os.chdir(here)
        folder.chmod(mode)
