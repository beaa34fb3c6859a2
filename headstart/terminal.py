"""What the command line prints: mistakes on one line without secrets, and on stdout the result."""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any


class UsageError(ValueError):
    """The command line cannot be used as it was given."""


def one_line(error: BaseException) -> str:
    """An error's message on one line, with access tokens and passwords in addresses blanked.

    >>> one_line(OSError("no such model\\n  at https://me:pw@host/x with hf_abcdefghijkl"))
    'no such model at https://…@host/x with hf_…'
    >>> one_line(FileNotFoundError(2, "No such file or directory", "chats/a.jsonl"))
    'chats/a.jsonl: No such file or directory'
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    return blank(" ".join(text.split()) or type(error).__name__)


def blank(text: Any) -> Any:
    """A text, or all the texts in a document, without secrets and terminal control characters.

    >>> blank({"name": "\\x1b[31mred", "notes": ["hf_abcdefghijkl"]})
    {'name': '\\\\x1b[31mred', 'notes': ['hf_…']}
    """
    if isinstance(text, dict):
        return {blank(key): blank(value) for key, value in text.items()}
    if isinstance(text, list):
        return [blank(value) for value in text]
    if not isinstance(text, str):
        return text
    text = visible(text)
    text = re.sub(r"hf_[A-Za-z0-9]{8,}", "hf_…", text)
    return re.sub(r"://[^/@\s]+@", "://…@", text)


def visible(text: str) -> str:
    """A text whose control characters, but for line ends and tabs, are written as escapes.

    So are those that turn the direction of writing. Spaces of any width, and what joins the parts
    of an emoji, stay.

    >>> print(visible("\\x1b[2Jab"))
    \\x1b[2Jab
    """
    return "".join(c if c.isprintable() or _harmless(c) else repr(c)[1:-1] for c in text)


def _harmless(character: str) -> bool:
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8, which bytes that could not be read cannot.

    >>> is_utf8("τ"), is_utf8("\\udcff")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def tell(notes: Sequence[str]) -> None:
    """Print notes on stderr, a line each."""
    for note in notes:
        print(note, file=sys.stderr)


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
