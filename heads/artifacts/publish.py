"""What is pushed of an artifact: a copy of it without paths of this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, get_token

from ..core import ArtifactError
from ..declared.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .files import (
    CARD,
    COPIED,
    FILES,
    HERE,
    REPORT_LINK,
    TARGET_HERE,
    brief,
    card_example,
    load_call,
    read_json,
)
from .hub import has_page, is_hub_name, split_revision
from .license import LICENSE
from .local_paths import cleaner, is_local, local_paths
from .manifest import Manifest
from .source import DrafterSource


def clean_copy(
    artifact: str | Path | DrafterSource,
    into: Path,
    repository: str,
    target_name: str | None = None,
    license: Mapping[str, str] | None = None,
    engines: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the files to push into an empty folder, and return them, the card last.

    In the manifest, the card and every other text, a path of this machine is replaced by its last
    part, and the target's by `target_name`. The card's front matter is completed for the Hub.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@BRANCH`, for the card's example.
        target_name: the target's name on the Hub, or any label for a model that is not there.
        license: for the card's front matter: `license`, an identifier that the Hub knows, such as
            `apache-2.0`; where that is `other` also `license_name` and `license_link`.
        engines: the lines that start other engines, by their formats, for the card.

    Raises:
        ArtifactError: a damaged artifact, a target without a public name, an access token in a
            file, or a malformed repository name.
    """
    name, _ = split_revision(repository)
    if not has_page(name):
        swapped = " The drafter is the first argument." if Path(repository).exists() else ""
        raise ArtifactError(
            f"{repository!r} is not the name of a Hub repository; expected ORG/NAME.{swapped}"
        )
    source = DrafterSource.of(artifact)
    manifest, folder = source.manifest, source.folder
    source.check_files()
    target = _public_name(manifest, target_name)
    clean = cleaner(local_paths(manifest) | {manifest.target: target})
    for name in FILES:
        unused = name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) and not manifest.adapter_sha256
        if name == CARD or unused or not (folder / name).is_file():
            continue
        (into / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors") or name in COPIED:
            shutil.copyfile(folder / name, into / name)
        else:
            data = _map_strings(read_json(folder / name), clean)
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
            (into / name).write_text(text, encoding="utf-8")
    body = _text(folder / CARD) if (folder / CARD).is_file() else ""
    body = body.replace(f"{REPORT_LINK}\n\n", "").replace(REPORT_LINK, "")
    if engines:
        body += _engines(engines)
    card = _card(clean(body), manifest, target, repository, license)
    (into / CARD).write_text(card, encoding="utf-8")
    files = [into / name for name in FILES if (into / name).is_file()]
    token = get_token()
    for path in files:
        binary = path.suffix in (".safetensors", ".png")
        text = "" if binary else path.read_text(encoding="utf-8", errors="replace")
        if re.search(r"\bhf_[A-Za-z0-9]{20,}", text) or (token and token in text):
            raise ArtifactError(
                f"{path.name} holds an access token; remove it from the artifact, and revoke it, "
                "before pushing."
            )
    return files


def public_target(artifact: str | Path | DrafterSource, given: str | None = None) -> str:
    """The name that an artifact's target has for others; an ArtifactError where there is none."""
    return _public_name(DrafterSource.of(artifact).manifest, given)


def _public_name(manifest: Manifest, given: str | None) -> str:
    name = manifest.target if given is None else given
    if not name.strip() or "\n" in name or is_local(name):
        why = "a path on this machine, which other users do not have"
    elif given is None and not is_hub_name(name):
        why = "not the name of a Hub repository"
    elif given is None and not manifest.target_revision:  # every model of the Hub has one
        why = "not known to be on the Hub, since no commit of it was recorded"
    else:
        return name
    raise ArtifactError(
        f"the target {name!r} is {why}; give its name on the Hub, or any label, with --target-name."
    )


def _text(path: Path) -> str:
    """A text file without a byte order mark, which some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArtifactError(
            f"{path} is no text in UTF-8 ({brief(error)}); save it as such, or remove it."
        ) from error


def _card(
    body: str, manifest: Manifest, target: str, repository: str, license: Mapping[str, str] | None
) -> str:
    if not body.strip():
        body = f"# A {manifest.family} drafter for `{target}`\n\n{card_example(target)}"
    body = body.replace(HERE, f'"{repository}"')
    on_hub = has_page(target)
    if not on_hub and (named := load_call(target)) in body:
        body = body.replace(named, f"headstart.load({TARGET_HERE},")
        body += f"\nThe target, `{target}`, is not on the Hub: loading needs its folder.\n"
    try:
        card = ModelCard(body if body.startswith("---") else f"---\n{{}}\n---\n\n{body}")
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = brief(error, None)
        raise ArtifactError(
            f"the front matter of {CARD} cannot be read ({reason}); correct or remove it."
        ) from error
    data, tags = card.data, card.data.get("tags") or []
    data["library_name"] = "headstart"
    data["pipeline_tag"] = data.get("pipeline_tag") or "text-generation"
    tags = [tags] if isinstance(tags, str) else tags
    added = ("headstart", "speculative-decoding", manifest.family)
    data["tags"] = list(dict.fromkeys([*tags, *added]))
    if on_hub:
        data["base_model"] = target
    if license:
        for name in LICENSE:
            data[name] = license.get(name)  # what is None is not written
    return str(card)


def _engines(lines: Mapping[str, str]) -> str:
    """The card's part on other engines, each of which reads a branch of its own."""
    parts = [f"\n`{form}`:\n\n```bash\n{line}\n```\n" for form, line in lines.items()]
    told = "Branches of this repository hold the same drafter as other engines read it.\n"
    return f"\n## In other engines\n\n{told}{''.join(parts)}"


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON document with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value
