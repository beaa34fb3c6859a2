"""The licence of a drafter that is made of another's files, as the card beside these names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..core import ArtifactError
from .files import CARD
from .hub import download, is_hub_name, split_revision
from .manifest import commit_of
from .source import DrafterSource, SourceKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LICENSE = ("license", "license_name", "license_link")
"""What the front matter of a card says of it, as the Hub reads it."""

_FRONT = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)


def license_of(source: DrafterSource, target: PreTrainedModel) -> dict[str, str]:
    """The entries of `LICENSE` for what is made of a drafter's files, or of its target's own.

    A link to a file of a repository becomes its address; one beside a folder is left out. Nothing
    where no card is there, or names none.
    """
    name = str(source)
    if source.kind is SourceKind.IN_TARGET:
        name = str(target.name_or_path)
        revision = commit_of(target)
        try:
            folder = Path(name)
            if not folder.is_dir():
                folder = download(f"{name}@{revision}" if revision else name, [CARD])
        except ArtifactError:
            return {}
    else:
        folder = source.folder
    said = _front_matter(folder / CARD)
    found = {key: said[key] for key in LICENSE if isinstance(said.get(key), str)}
    link = found.get("license_link", "")
    if "license" not in found or not link or link.startswith(("https://", "http://")):
        return found if "license" in found else {}
    repository, revision = split_revision(name)
    if Path(name).is_dir() or not is_hub_name(repository):
        del found["license_link"]
        return found
    address = f"https://huggingface.co/{repository}/blob/{revision or 'main'}/"
    return found | {"license_link": address + link.removeprefix("./")}


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        front = _FRONT.match(card.read_text(encoding="utf-8-sig"))
        said = yaml.safe_load(front[1]) if front else {}
    except (OSError, ValueError, yaml.YAMLError):  # no card, or none that says anything
        return {}
    return said if isinstance(said, dict) else {}
