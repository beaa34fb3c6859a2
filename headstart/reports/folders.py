"""The folder that a report is written into."""

import os
from pathlib import Path

from headstart.terminal import UsageError


def check_folder(folder: Path) -> Path:
    """Make the folder, or refuse it in one line, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {folder}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--report {folder} cannot be written; name another folder")
    return folder
