"""Paths of this machine in documents that are published: found, and replaced by their last part."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any


def is_local(text: str) -> bool:
    """Whether a text is a path of this machine, such as a recipe's setting.

    >>> [is_local(text) for text in ("/data/x.txt", "~/x", "C:\\\\x", "org/name", "stdlib")]
    [True, True, True, False, False]
    """
    outside = text.startswith(("/", "~", "./", "../", "file:"))
    return "\n" not in text and (outside or PureWindowsPath(text).drive != "" or _is_folder(text))


def _is_folder(text: str) -> bool:
    return "/" in text and len(text) < 256 and Path(text).is_dir()


def local_paths(value: Any) -> dict[str, str]:
    """The strings in a JSON document that are paths of this machine, and the last part of each."""
    if isinstance(value, str):
        name = PureWindowsPath(value.rstrip("/\\")).name  # knows both kinds of slashes
        return {value: name} if len(value) > 3 and name and is_local(value) else {}
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {path: name for item in each for path, name in local_paths(item).items()}


def cleaner(known: dict[str, str]) -> Callable[[str], str]:
    """A function that replaces paths in a text: known ones by their names, others by the last part.

    Of a known folder's files, and of paths whose first folder exists here, the last part is kept.

    >>> cleaner({"/data/base": "org/base"})("/data/base, /data/base/x.json, https://h/data/base.")
    'org/base, x.json, https://h/data/base.'
    """
    below = r"(?P<below>(?:[/\\][\w.+@-]*[\w+@])*)"  # a sentence's full stop is no part of it
    names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    rename = re.compile(rf"(?<![\w/.~-])(?P<known>{names}){below}(?![\w/-])")
    absolute = re.compile(rf"(?<![\w:/\\.~-])(?P<known>/[\w.+@-]+){below}/?")

    def renamed(match: re.Match[str]) -> str:
        return Path(match["below"]).name or known[match["known"]]

    def shortened(match: re.Match[str]) -> str:
        # Where the first folder does not exist, it is a route or a formula, not a path.
        here = match["below"] and Path(match["known"]).is_dir()
        return Path(match["below"]).name if here else match.group()

    return lambda text: absolute.sub(shortened, rename.sub(renamed, text))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON document with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return [map_strings(item, change) for item in value] if isinstance(value, list) else value
