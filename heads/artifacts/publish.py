"""What is pushed of an artifact: a copy of it without paths of this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PureWindowsPath
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
from .manifest import Manifest
from .source import DrafterSource


def clean_copy(
    artifact: str | Path | DrafterSource,
    into: Path,
    repository: str,
    target_name: str | None = None,
    license: str | None = None,
    engines: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the files to push into an empty folder, and return them, the card last.

    In the manifest, the card and every other text, a path of this machine is replaced by its last
    part, and the target's by `target_name`. The card's front matter is completed for the Hub.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@BRANCH`, for the card's example.
        target_name: the target's name on the Hub, or any label for a model that is not there.
        license: an identifier that the Hub knows, such as `apache-2.0`.
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
    paths = _local_paths(
        [manifest.recipe, manifest.metrics, manifest.origin, manifest.trained.get("data")]
    )
    clean = cleaner(paths | {manifest.target: target})
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
    body = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    body = body.replace(f"{REPORT_LINK}\n\n", "").replace(REPORT_LINK, "")
    if engines:
        body += _engines(engines)
    card = _card(clean(body), manifest, target, repository, license)
    (into / CARD).write_text(card, encoding="utf-8")
    files = [into / name for name in FILES if (into / name).is_file()]
    token = get_token()
    for path in files:
        binary = path.suffix in (".safetensors", ".png")
        text = "" if binary else path.read_text(encoding="utf-8")
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
    else:
        return name
    raise ArtifactError(
        f"the target {name!r} is {why}; give its name on the Hub, or any label, with --target-name."
    )


def _card(body: str, manifest: Manifest, target: str, repository: str, license: str | None) -> str:
    if not body.strip():
        body = f"# A {manifest.family} drafter for `{target}`\n\n{card_example(target)}"
    body = body.replace(HERE, f'"{repository}"')
    on_hub = has_page(target)
    if not on_hub and (named := load_call(target)) in body:
        body = body.replace(named, f"headstart.load({TARGET_HERE},")
        body += f"\nThe target, `{target}`, is not on the Hub: loading needs its folder.\n"
    try:
        card = ModelCard(body if body.startswith("---") else f"---\n{{}}\n---\n\n{body}")
    except (ValueError, yaml.YAMLError) as error:
        reason = brief(error, None)
        raise ArtifactError(
            f"the front matter of {CARD} cannot be read ({reason}); correct or remove it."
        ) from error
    data, tags = card.data, card.data.get("tags") or []
    data["library_name"] = "headstart"
    tags = [tags] if isinstance(tags, str) else tags
    added = ("headstart", "speculative-decoding", manifest.family)
    data["tags"] = list(dict.fromkeys([*tags, *added]))
    if on_hub:
        data["base_model"] = target
    if license is not None:
        data["license"] = license
    return str(card)


def _engines(lines: Mapping[str, str]) -> str:
    """The card's part on other engines, each of which reads a branch of its own."""
    parts = [f"\n`{form}`:\n\n```bash\n{line}\n```\n" for form, line in lines.items()]
    told = "Branches of this repository hold the same drafter as other engines read it.\n"
    return f"\n## In other engines\n\n{told}{''.join(parts)}"


def is_local(text: str) -> bool:
    """Whether a text is a path of this machine, such as a recipe's setting.

    >>> [is_local(text) for text in ("/data/x.txt", "~/x", "C:\\\\x", "org/name", "stdlib")]
    [True, True, True, False, False]
    """
    if "\n" in text:
        return False
    outside = text.startswith(("/", "~", "./", "../", "file:")) or PureWindowsPath(text).drive != ""
    return outside or ("/" in text and len(text) < 256 and Path(text).is_dir())


def _local_paths(value: Any) -> dict[str, str]:
    """The strings in a JSON document that are paths of this machine, and the last part of each."""
    if isinstance(value, str):
        name = PureWindowsPath(value.rstrip("/\\")).name  # knows both kinds of slashes
        return {value: name} if len(value) > 3 and name and is_local(value) else {}
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {path: name for item in each for path, name in _local_paths(item).items()}


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


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON document with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value
