"""What an artifact is, from its files alone, as a document."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headstart.heads import DrafterConfig, family
from headstart.heads.artifacts.checks import check_files, check_target
from headstart.heads.artifacts.files import CARD, FILES, WEIGHTS
from headstart.heads.artifacts.manifest import Manifest, sha256
from headstart.heads.artifacts.plan import read_plans
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import ArtifactError
from headstart.heads.parts.adapter import ADAPTER, ADAPTER_WEIGHTS
from headstart.infer import StaticTree

Description = dict[str, Any]


def describe(name: str | Path | DrafterSource) -> Description:
    """Everything that an artifact says about itself; no target is loaded.

    Returns:
        A document for JSON. `problem` is None for a whole artifact, else the error that loading
        would give; what the damage hides is then missing. `files` has, for each file, its `bytes`,
        `sha256` and `check`: `ok`, `damaged`, or `unchecked` where there is nothing to check it
        against. `plans` has one entry for each machine that was planned for; where `current` is
        false it was made for other weights, and loading passes it over.

    Raises:
        ArtifactError: there is no artifact of that name, or its manifest cannot be read.
    """
    source = DrafterSource.of(name)
    folder, manifest = source.folder, source.manifest
    found: Description = {"artifact": source.name, "folder": str(folder), "problem": None}
    found |= {
        "family": manifest.family,
        "origin": manifest.origin or None,
        "target": manifest.target,
        "target_fingerprint": manifest.target_fingerprint,
        "tokenizer_hash": manifest.tokenizer_hash or None,
    }
    for part in (_config, _weights, _tree, _plans):
        try:
            found |= part(source)
        except (ValueError, OSError) as error:
            found["problem"] = found["problem"] or " ".join(str(error).split())
    try:
        check_files(folder, manifest)
    except ArtifactError as error:
        found["problem"] = str(error)
    found |= {
        "recipe": manifest.recipe,
        "metrics": manifest.metrics,
        "versions": manifest.versions,
        "files": [
            _file(path, folder, manifest)
            for path in sorted((*folder.iterdir(), *(folder / ADAPTER).glob("*")))
            if path.is_file()
        ],
    }
    return found


def fits(source: DrafterSource, target: Any, tokenizer: Any) -> str | None:
    """None where the drafter was trained for this target and tokenizer, else why not."""
    try:
        check_target(source.manifest, target, tokenizer, source.folder)
    except ArtifactError as error:
        return str(error)
    return None


def _config(source: DrafterSource) -> Description:
    kind = family(source.manifest.family).config_class
    assert kind is not None and issubclass(kind, DrafterConfig)
    config: Any = kind.from_pretrained(source.folder, local_files_only=True)
    return {
        "options": {option: getattr(config, option) for option in kind.OPTIONS},
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "feature_layers": list(config.feature_layers),
    }


def _weights(source: DrafterSource) -> Description:
    """Names, shapes and dtypes; the tensors are not read."""
    path = source.folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            tensors = {
                key: {"shape": each.get_shape(), "dtype": each.get_dtype()}
                for key, each in slices.items()
            }
    except (SafetensorError, OSError):
        return {}  # `check_files` says why
    floats = [math.prod(t["shape"]) for t in tensors.values() if t["dtype"].startswith(("F", "BF"))]
    return {"tensors": tensors, "parameters": sum(floats), "bytes": path.stat().st_size}


def _tree(source: DrafterSource) -> Description:
    if source.tree is None:
        return {"tree": None}
    tree = StaticTree(source.tree)
    return {"tree": {"name": tree.label, "nodes": tree.nodes, "depth": tree.max_depth}}


def _plans(source: DrafterSource) -> Description:
    long = ("acceptance", "costs", "candidates", "weights_sha256")
    plans = []
    for plan in read_plans(source.folder):
        shown = {name: value for name, value in vars(plan).items() if name not in long}
        plans.append(shown | {"current": plan.weights_sha256 == source.manifest.weights_sha256})
    return {"plans": plans}


def _file(path: Path, folder: Path, manifest: Manifest) -> Description:
    check, digest, name = "unchecked", sha256(path), path.relative_to(folder).as_posix()
    saved = {WEIGHTS: manifest.weights_sha256, ADAPTER_WEIGHTS: manifest.adapter_sha256}
    if name in saved:
        check = "ok" if digest == saved[name] else "damaged"
    elif name in FILES and name != CARD:
        try:
            json.loads(path.read_text(encoding="utf-8"))
            check = "ok"
        except ValueError:
            check = "damaged"
    return {"name": name, "bytes": path.stat().st_size, "sha256": digest, "check": check}
