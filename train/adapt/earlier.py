"""What a drafter was trained on and measured with, where its run is still there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.heads.artifacts.source import DrafterSource

from ..recipe import Recipe, RecipeError, keys_of, recipe_of
from ..stages.folders import RECORD, StageFolder, read_record, stage_folders


@dataclass(frozen=True)
class Earlier:
    """The stages behind an artifact; None for what is not there, or not whole.

    Attributes:
        rows: the folder of its training rows.
        corpus: the folder of its documents.
        recipe: by which it was trained.
    """

    rows: Path | None = None
    corpus: Path | None = None
    recipe: Recipe | None = None


def find_earlier(source: DrafterSource) -> Earlier:
    """The stages that an artifact was made from, by the ids in their records."""
    keys = source.manifest.recipe
    record = read_record(source.folder / RECORD)
    if not keys or record is None:
        return Earlier()
    root = source.folder.resolve().parent
    roots = [root, *([root.with_name(keys["shares"])] if keys.get("shares") else [])]
    trained = _with_id(roots, "train", record)
    rows = _with_id(roots, "distill", (trained and trained.record) or {})
    corpus = _with_id(roots, "corpus", record)
    try:
        recipe = recipe_of(keys_of(keys))
    except RecipeError:  # of another version
        recipe = None
    return Earlier(rows and rows.path, corpus and corpus.path, recipe)


def _with_id(roots: list[Path], name: str, reader: dict[str, Any]) -> StageFolder | None:
    """The stage of this name that a record says it has read."""
    wanted = (reader.get("reads") or {}).get(name)
    return next((f for f in _stages(roots, name) if (f.record or {}).get("id") == wanted), None)


def _stages(roots: list[Path], name: str) -> Iterator[StageFolder]:
    for root in roots:
        yield from stage_folders(root, name)
