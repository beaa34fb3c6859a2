"""The artifact: a folder (or Hub repository) that holds a trained drafter and where it came from.

`config.json` (family and shapes), `model.safetensors`, `headstart.json` (manifest), `tree.json`
(the rank paths it was measured with), `plan.json` where planned and `README.md` (model card); with
`adapter/` where the target was trained too. Nothing is pickled. It is found, read and checked here,
written by `saving`, and made a drafter by `loading`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from ..families import FAMILIES, family
from ..parts.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .hub import download, file_names, is_hub_name, split_revision
from .manifest import Manifest, fingerprint, sha256, tokenizer_hash

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "headstart.json"
TREE, PLAN, CARD = "tree.json", "plan.json", "README.md"
FILES = (CONFIG, WEIGHTS, MANIFEST, TREE, PLAN, CARD, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""All that an artifact may hold; nothing else is downloaded or pushed."""

PICKLE = "pytorch_model.bin"
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
# Settings with which a config.json makes transformers run other code or read other files than ours.
_FOREIGN = ("auto_map", "transformers_weights", "quantization_config", "attn_implementation")


def artifact_folder(name: str | Path, allow_pickle: bool = False) -> Path:
    """The local folder of an artifact: a path as it is, or a Hub repository once downloaded.

    Args:
        name: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub.
        allow_pickle: fetch `pytorch_model.bin` as well.

    Raises:
        ArtifactError: neither.
    """
    folder = Path(name)
    for found in (folder, beside(folder, "retired") if folder.name else folder):
        if found.is_dir():
            return found
    if not is_hub_name(split_revision(str(name))[0]):
        raise ArtifactError(
            f"no drafter at {str(name)!r}: neither a folder nor the name of a Hub repository; "
            "check the name."
        )
    found = download(str(name), [*FILES, PICKLE] if allow_pickle else FILES)
    if not (found / WEIGHTS).is_file() and not allow_pickle:
        _refuse_pickles(str(name), file_names(str(name)))
    if not found.is_dir():
        raise ArtifactError(
            f"{name} holds no {MANIFEST}; expected a repository that headstart pushed."
        )
    return found


def read_manifest(name: str | Path) -> Manifest:
    """The manifest of an artifact.

    Raises:
        ArtifactError: there is none, or it cannot be read.
    """
    path = artifact_folder(name) / MANIFEST
    data = read_json(path)
    try:
        manifest = Manifest(**data)
    except TypeError as error:
        raise ArtifactError(_unreadable(path, error)) from error
    for each in fields(Manifest):
        kind = str if each.type == "str" else dict
        if not isinstance(getattr(manifest, each.name), kind):
            raise ArtifactError(_unreadable(path, f"{each.name} is not a {kind.__name__}"))
    return manifest


def read_tree(name: str | Path) -> list[list[int]] | None:
    """The rank paths that an artifact was measured with; None where it has none."""
    if not is_artifact(name):
        return None
    path = artifact_folder(name) / TREE
    return read_json(path) if path.is_file() else None


def is_artifact(name: str | Path) -> bool:
    """Whether a drafter's name is an artifact's, not `lookup` or somebody else's checkpoint."""
    return not is_weightless(name) and not is_foreign(name)


def is_weightless(name: str | Path) -> bool:
    """Whether a name is a family's without weights, which has no artifact; a folder of it wins."""
    known = str(name) in FAMILIES and family(str(name)).weightless
    return known and not Path(name).exists()


def is_foreign(name: str | Path) -> bool:
    """Whether a name is somebody else's checkpoint: a language model's, or another's drafter."""
    folder = Path(name)
    if not folder.is_dir():
        repository, _ = split_revision(str(name))
        if folder.exists() or not is_hub_name(repository) or beside(folder, "retired").is_dir():
            return False
        folder = download(str(name), [CONFIG, MANIFEST])
    if (folder / MANIFEST).is_file() or not (folder / CONFIG).is_file():
        return False
    kind = str(read_json(folder / CONFIG).get("model_type"))
    return not kind.startswith("headstart_")


def check_target(
    manifest: Manifest,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> None:
    """Refuse a target, or a tokenizer where one is given, that the drafter was not trained for.

    Raises:
        ArtifactError: its fingerprint is another.
    """
    pairs = [("target", manifest.target_fingerprint, fingerprint(target))]
    if tokenizer is not None and manifest.tokenizer_hash:
        pairs.append(("tokenizer", manifest.tokenizer_hash, tokenizer_hash(tokenizer)))
    for what, expected, found in pairs:
        if expected != found:
            raise ArtifactError(
                f"{folder} was trained for another {what}: expected fingerprint {expected[:12]} "
                f"({manifest.target}), found {found[:12]}; load the {what} it was trained for, or "
                "train a drafter for this one."
            )


def check_files(folder: Path, manifest: Manifest, allow_pickle: bool = False) -> Path:
    """Check that an artifact's files are whole and ask for no foreign code.

    Returns:
        The file of weights.

    Raises:
        ArtifactError: a file is missing, damaged, pickled, or names code or files to load.
    """
    config = read_json(folder / CONFIG)
    found, wanted = config.get("model_type"), f"headstart_{manifest.family}"
    if manifest.family in FAMILIES and family(manifest.family).saved_as_language_model:
        wanted = found if found in CONFIG_MAPPING else "one of transformers' own"
    if found != wanted:
        raise ArtifactError(
            f"{folder / CONFIG} is of model type {found!r}, expected {wanted!r} as {MANIFEST} "
            "says; restore both files."
        )
    if foreign := [key for key in _FOREIGN if key in config]:
        raise ArtifactError(
            f"{folder / CONFIG} sets {foreign[0]}, which can load other code or files; a drafter "
            "needs none: do not use it, or remove the entry."
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        if allow_pickle and (folder / PICKLE).is_file():
            weights = folder / PICKLE
        else:
            _refuse_pickles(str(folder), sorted(path.name for path in folder.iterdir()))
    if not weights.is_file() or sha256(weights) != manifest.weights_sha256:
        raise ArtifactError(
            f"{weights} is missing or not the file that was saved (its sha256 differs from the "
            "manifest's); restore it or download the drafter again."
        )
    adapter = folder / ADAPTER_WEIGHTS
    whole = sha256(adapter) if adapter.is_file() else ""
    if whole != manifest.adapter_sha256:
        raise ArtifactError(
            f"{adapter} is missing or not the adapter that was saved (its sha256 differs from the "
            "manifest's); restore it or download the drafter again."
        )
    return weights


def read_json(path: Path) -> Any:
    """A JSON file of an artifact: a dict, but a list for the tree.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    if not path.is_file():
        raise ArtifactError(
            f"{path.parent} holds no {path.name}; expected a folder that headstart saved: restore "
            "the file or download the drafter again."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(_unreadable(path, error)) from error
    if not isinstance(data, list if path.name == TREE else dict):
        raise ArtifactError(_unreadable(path, f"it holds a {type(data).__name__}"))
    return data


def _unreadable(path: Path, why: object) -> str:
    reason = " ".join(str(why).split())
    return f"{path} cannot be read ({reason}); restore the file or train again."


def _refuse_pickles(where: str, names: list[str]) -> None:
    if pickles := [name for name in names if Path(name).suffix in _PICKLED]:
        raise ArtifactError(
            f"{where} holds no {WEIGHTS} but {pickles[0]}, a pickle, which can run any code; ask "
            f"for safetensors, or trust a {PICKLE} with load_drafter(…, allow_pickle=True)."
        )


def beside(folder: Path, state: str) -> Path:
    """Where a folder stands while it is `partial` or `retired`: hidden, next to its own place."""
    return folder.with_name(f".{folder.name}.{state}")
