"""Paths of this machine in what an artifact says of itself, and its texts without them."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit

from .hub import is_hub_name, split_revision
from .manifest import Manifest


def is_local(text: str) -> bool:
    """Whether a text is a path of this machine, such as a recipe's setting.

    >>> [is_local(text) for text in ("/data/x.txt", "~/x", "C:\\\\x", "org/name", "stdlib")]
    [True, True, True, False, False]
    """
    if "\n" in text:
        return False
    outside = text.startswith(("/", "~", "./", "../", "file:")) or PureWindowsPath(text).drive != ""
    return outside or ("/" in text and len(text) < 256 and Path(text).exists())


def _is_model_here(name: str) -> bool:
    """Of a model's folder or `ORG/NAME@REVISION`: whether it is a folder.

    A folder of two parts that is gone cannot be told from a name of the Hub.
    """
    return is_local(name) or not is_hub_name(split_revision(name)[0])


def _is_origin_here(name: str) -> bool:
    """Of what `DrafterSource.origin` says: whether it is a folder."""
    repository, commit = split_revision(name)
    return not (is_hub_name(repository) and re.fullmatch("[0-9a-f]{40}", commit or ""))


def _is_source_here(source: str) -> bool:
    """Of a corpus' source: whether it is a path, as all but data sets of the Hub are."""
    return not source.startswith("hub:")


_ALWAYS: Callable[[str], bool] = lambda text: True  # noqa: E731

PATHS: dict[str, Callable[[str], bool]] = {
    "recipe.corpus.source": _is_source_here,
    "recipe.corpus.sources.source": _is_source_here,
    "trained.data.sources": _is_source_here,
    "recipe.output": _ALWAYS,
    "recipe.distill.earlier": _ALWAYS,
    "recipe.decode.tree": _ALWAYS,
    "recipe.hardware.launch": _ALWAYS,
    "recipe.target.model": _is_model_here,
    "recipe.corpus.writer": _is_model_here,
    "recipe.distill.drafter": _is_model_here,
    "recipe.distill.openai.model": _is_model_here,
    "recipe.train.from": _is_model_here,
    "recipe.drafter.options.model": _is_model_here,
    "origin": _is_origin_here,
    "metrics.adapted.from": _is_origin_here,
}
"""Where a manifest may name a path, and which of the texts there are some.

A word without a slash, such as a shipped name, is its own last part.
"""


SERVER, HOST = "recipe.distill.openai.url", "HOST"
"""Where a manifest names the address of a server, and what stands for its host and port."""


def local_paths(manifest: Manifest) -> dict[str, str]:
    """The paths of this machine that a manifest names, and the last part of each.

    Those in fields of `PATHS` are known by the field, whether or not they exist now. The address of
    the server that wrote the text is among them, and stands without its host.
    """
    told = {
        "recipe": manifest.recipe,
        "metrics": manifest.metrics,
        "origin": manifest.origin,
        "trained": {"data": manifest.trained.get("data")},
    }
    found: dict[str, str] = {}
    for field, text in _texts(told):
        is_path = PATHS.get(field, lambda text: len(text) > 3 and is_local(text))
        stem = text.rstrip("/\\")
        name = PureWindowsPath(stem).name  # knows both kinds of slashes
        if name and is_path(text):
            spelled = (text, stem, os.path.normpath(stem))
            found |= {each: name for each in spelled if each != name}
        if field == SERVER:
            parts = urlsplit(text)
            found[text] = f"{parts.scheme}://{HOST}{parts.path}"
    return found


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


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """The strings in a JSON document, each with the keys that lead to it, joined by dots."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, field)
