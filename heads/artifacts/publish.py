"""Publishing: a copy of an artifact without paths of this machine, pushed to the Hub."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, get_token

from ..core import ArtifactError
from ..parts.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .checks import check_files
from .files import CARD, FILES, MANIFEST, read_json
from .hub import is_hub_name, split_revision, upload
from .local_paths import cleaner, is_local, local_paths, map_strings
from .manifest import Manifest
from .source import DrafterSource

_TAGS = ["headstart", "speculative-decoding"]
_HERE = '"PATH OF THIS FOLDER"'  # in the example of a card that was not pushed


def clean_copy(
    artifact: str | Path | DrafterSource,
    into: Path,
    repository: str,
    target_name: str | None = None,
    license: str | None = None,
) -> list[Path]:
    """Write the files to push into an empty folder, and return them.

    In the manifest, the card and every other text, a path of this machine is replaced by its last
    part, and the target's by `target_name`. The card's front matter is completed for the Hub.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@BRANCH`, for the card's example.
        target_name: the target's name on the Hub, or any label for a model that is not there.
        license: an identifier that the Hub knows, such as `apache-2.0`.

    Raises:
        ArtifactError: a damaged artifact, a target without a public name, an access token in a
            file, or a malformed repository name.
    """
    name, _ = split_revision(repository)
    if "/" not in name or not is_hub_name(name):
        raise ArtifactError(f"{repository!r} is no place on the Hub; expected ORG/NAME.")
    source = DrafterSource.of(artifact)
    manifest, folder = source.manifest, source.folder
    check_files(folder, manifest)
    target = _public_name(manifest, target_name)
    paths = local_paths([manifest.recipe, manifest.metrics, manifest.origin])
    clean = cleaner(paths | {manifest.target: target})
    for name in FILES:
        unused = name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) and not manifest.adapter_sha256
        if name == CARD or unused or not (folder / name).is_file():
            continue
        (into / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            shutil.copyfile(folder / name, into / name)
        else:
            data = map_strings(read_json(folder / name), clean)
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
    if not name.strip() or "\n" in name or is_local(name):
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


def _refuse_token(path: Path) -> None:
    text, mine = path.read_text(encoding="utf-8"), get_token()
    if re.search(r"\bhf_[A-Za-z0-9]{20,}", text) or (mine and mine in text):
        raise ArtifactError(
            f"{path.name} holds an access token; remove it from the artifact, and revoke it, "
            "before pushing."
        )
