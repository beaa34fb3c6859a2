"""The clean copy of an artifact that goes to the Hub: its own files alone, without local paths."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import ModelCard, get_token

from ..core import ArtifactError
from ..parts.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .files import (
    CARD,
    CONFIG,
    FILES,
    MANIFEST,
    PLAN,
    TREE,
    WEIGHTS,
    artifact_folder,
    check_files,
    read_json,
    read_manifest,
)
from .hub import is_hub_name, split_revision, upload
from .manifest import Manifest

_TAGS = ["headstart", "speculative-decoding"]
_HERE = '"PATH OF THIS FOLDER"'  # what a card that was not pushed says instead of a name


def clean_copy(
    artifact: str | Path,
    into: Path,
    repository: str,
    target_name: str | None = None,
    license: str | None = None,
) -> list[Path]:
    """Write what is to be pushed into an empty folder, and return its files.

    Paths of this machine become their last part, in the manifest, the card and every other text;
    the target's becomes `target_name`. The card's front matter is completed for the Hub.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@BRANCH`, which the card's example loads.
        target_name: the target's name on the Hub, or any label of a model that is not there.
        license: an identifier that the Hub knows, such as `apache-2.0`.

    Raises:
        ArtifactError: a damaged artifact, a target without a public name, an access token in a
            file, or no such repository's name.
    """
    name, _ = split_revision(repository)
    if "/" not in name or not is_hub_name(name):
        raise ArtifactError(f"{repository!r} is no place on the Hub; expected ORG/NAME.")
    folder = artifact_folder(artifact)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    target = _public_name(manifest, target_name)
    clean = _cleaner(
        _paths([manifest.recipe, manifest.metrics, manifest.origin]) | {manifest.target: target}
    )

    shutil.copyfile(folder / WEIGHTS, into / WEIGHTS)
    documents = [CONFIG, MANIFEST, TREE, PLAN]
    if manifest.adapter_sha256:
        (into / ADAPTER).mkdir()
        shutil.copyfile(folder / ADAPTER_WEIGHTS, into / ADAPTER_WEIGHTS)
        documents.append(ADAPTER_CONFIG)
    for name in documents:
        if (folder / name).is_file():
            data = _strings(read_json(folder / name), clean)
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
            (into / name).write_text(text, encoding="utf-8")
    body = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    card = _card(clean(body), manifest, target, repository, license)
    (into / CARD).write_text(card, encoding="utf-8")
    files = [into / name for name in FILES if (into / name).is_file()]
    for path in files:
        if path.suffix != ".safetensors":
            _refuse_token(path)
    return files


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a clean copy to the Hub and return the repository's address; see `upload`."""
    return upload(folder, repository, FILES, marker=MANIFEST, private=private)


def _public_name(manifest: Manifest, given: str | None) -> str:
    name = manifest.target if given is None else given
    if not name.strip() or "\n" in name or _is_local(name):
        raise ArtifactError(
            f"the target {name!r} is a path of this machine, which says nothing to others; give "
            "its name on the Hub, or any label, with --target-name."
        )
    if given is None and not is_hub_name(name):
        raise ArtifactError(
            f"the target {name!r} is not the name of a Hub repository; give its name there, or any "
            "label, with --target-name."
        )
    return name


def _card(body: str, manifest: Manifest, target: str, repository: str, license: str | None) -> str:
    if not body.strip():
        body = (
            f"# A {manifest.family} drafter for `{target}`\n\n```python\nimport headstart\n\n"
            f"speculator = headstart.load({target!r}, {_HERE})\n```\n"
        )
    body = body.replace(_HERE, f'"{repository}"')
    try:
        card = ModelCard(body if body.startswith("---") else f"---\n{{}}\n---\n\n{body}")
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"the front matter of {CARD} cannot be read ({reason}); correct or remove it."
        ) from error
    data, tags = card.data, card.data.get("tags") or []
    data["library_name"] = "headstart"
    tags = [tags] if isinstance(tags, str) else tags
    data["tags"] = list(dict.fromkeys([*tags, *_TAGS, manifest.family]))
    if is_hub_name(target) and "/" in target:
        data["base_model"] = target
    if license is not None:
        data["license"] = license
    return str(card)


def _is_local(text: str) -> bool:
    """Whether a setting is a path of this machine, rather than another text.

    >>> [_is_local(text) for text in ("/data/x.txt", "~/x", "C:\\\\x", "org/name", "stdlib")]
    [True, True, True, False, False]
    """
    outside = text.startswith(("/", "~", "./", "../", "file:"))
    return "\n" not in text and (outside or PureWindowsPath(text).drive != "" or _is_folder(text))


def _is_folder(text: str) -> bool:
    return "/" in text and len(text) < 256 and Path(text).is_dir()


def _paths(value: Any) -> dict[str, str]:
    """Every string in a document that is a path of this machine, with its last part."""
    if isinstance(value, str):
        name = PureWindowsPath(value.rstrip("/\\")).name  # knows both kinds of slashes
        return {value: name} if len(value) > 3 and name and _is_local(value) else {}
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {path: name for item in each for path, name in _paths(item).items()}


def _cleaner(known: dict[str, str]) -> Callable[[str], str]:
    """A function that renames known paths in a text, and shortens others that exist here.

    >>> _cleaner({"/data/base": "org/base"})("/data/base, /data/base/x.json, https://h/data/base.")
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


def _strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same document with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _strings(item, change) for key, item in value.items()}
    return [_strings(item, change) for item in value] if isinstance(value, list) else value


def _refuse_token(path: Path) -> None:
    text, mine = path.read_text(encoding="utf-8"), get_token()
    if re.search(r"\bhf_[A-Za-z0-9]{20,}", text) or (mine and mine in text):
        raise ArtifactError(
            f"{path.name} holds an access token; remove it from the artifact, and revoke it, "
            "before pushing."
        )
