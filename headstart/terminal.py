"""What the command line prints: mistakes on one line without secrets, and on stdout the result."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator


class UsageError(ValueError):
    """The command line cannot be used as it was given."""


def one_line(error: BaseException) -> str:
    """An error's message on one line, with access tokens and passwords in addresses blanked.

    >>> one_line(OSError("no such model\\n  at https://me:pw@host/x with hf_abcdefghijkl"))
    'no such model at https://…@host/x with hf_…'
    """
    return blank(" ".join(str(error).split()) or type(error).__name__)


def blank(text: str) -> str:
    text = re.sub(r"hf_[A-Za-z0-9]{8,}", "hf_…", text)
    return re.sub(r"://[^/@\s]+@", "://…@", text)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what libraries print to stderr, without the progress of loading weights.

    Stdout holds the result alone; downloads still show their progress.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    downloads = not are_progress_bars_disabled()
    logging.disable_progress_bar()  # turns off that of downloads too
    if downloads:
        enable_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        yield
