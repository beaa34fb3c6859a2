"""What an artifact is, from its files alone: as a document, and as the table of `inspect`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, TextIO

from rich.filesize import decimal

from headstart.heads.artifacts.files import (
    CARD,
    CONFIG,
    COPIED,
    FILES,
    MANIFEST,
    WEIGHTS,
    read_header,
    read_json,
)
from headstart.heads.artifacts.manifest import Manifest, sha256
from headstart.heads.artifacts.plan import read_plans
from headstart.heads.artifacts.shapes import check_declared, read_config
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import FINAL, ArtifactError
from headstart.heads.declared.adapter import ADAPTER, ADAPTER_WEIGHTS
from headstart.heads.families import is_language_model
from headstart.infer.trees.paths import RankPaths

from .measured import percentages
from .plans import requests_of
from .tables import grid, print_apart, titled

Description = dict[str, Any]

_HASHED = 2**28
"""Bytes of the largest file beside an artifact's own whose sha256 is told."""


def describe(name: str | Path | DrafterSource) -> Description:
    """A document of what an artifact says about itself; no target is loaded.

    `problem` is None for a whole artifact, else the error that loading would give; what the damage
    hides is then missing. A file's `check` is `ok`, `damaged`, or `unchecked` where nothing tells.
    A plan that is not `current` was made for other weights, and loading passes it over. `ignored`
    are settings of a draft model's config that its architecture does not have: none is passed on.

    Raises:
        ArtifactError: there is no artifact of that name, or its manifest cannot be read.
    """
    source = DrafterSource.of(name)
    folder, manifest = source.folder, source.manifest
    found: Description = {
        "artifact": source.name,
        "folder": str(folder),
        "problem": None,
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
        check_declared(source, source.check_files())
    except ArtifactError as error:
        found["problem"] = str(error)
    paths = sorted((*folder.iterdir(), *(folder / ADAPTER).glob("*")))
    return found | {
        "recipe": manifest.recipe,
        "metrics": manifest.metrics,
        "versions": manifest.versions,
        "files": [_file(path, folder, manifest) for path in paths if path.is_file()],
    }


def fits(source: DrafterSource, target: Any, tokenizer: Any) -> str | None:
    """None where the drafter was trained for this target and tokenizer, else why not."""
    try:
        source.check_target(target, tokenizer)
    except ArtifactError as error:
        return str(error)
    return None


def _config(source: DrafterSource) -> Description:
    config = read_config(source)
    return {
        "ignored": _ignored(source),
        "options": {option: getattr(config, option) for option in config.OPTIONS},
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "feature_layers": list(config.feature_layers),
    }


def _ignored(source: DrafterSource) -> list[str]:
    """Of a language model the settings that its architecture does not have."""
    if not is_language_model(source.manifest.family):
        return []
    from headstart.heads.artifacts.settings import language_model_config
    from headstart.heads.pard import DRAFTING

    left_out = language_model_config(source.folder)[1]
    return [name for name in left_out if name not in DRAFTING]


def _weights(source: DrafterSource) -> Description:
    """Names, shapes and dtypes; the tensors are not read."""
    path = source.folder / WEIGHTS
    tensors = read_header(path)
    floats = [math.prod(t["shape"]) for t in tensors.values() if t["dtype"].startswith(("F", "BF"))]
    return {"tensors": tensors, "parameters": sum(floats), "bytes": path.stat().st_size}


def _tree(source: DrafterSource) -> Description:
    if source.tree is None:
        return {"tree": None}
    tree = RankPaths(source.tree)
    return {"tree": {"name": tree.label, "nodes": tree.nodes, "depth": tree.max_depth}}


def _plans(source: DrafterSource) -> Description:
    long = ("acceptance", "costs", "candidates", "weights_sha256")
    plans = []
    for plan in read_plans(source.folder):
        shown = {name: value for name, value in vars(plan).items() if name not in long}
        plans.append(shown | {"current": plan.weights_sha256 == source.manifest.weights_sha256})
    return {"plans": plans}


def _file(path: Path, folder: Path, manifest: Manifest) -> Description:
    check, name, size = "unchecked", path.relative_to(folder).as_posix(), path.stat().st_size
    digest = sha256(path) if name in FILES or size <= _HASHED else None
    saved = {WEIGHTS: manifest.weights_sha256, ADAPTER_WEIGHTS: manifest.adapter_sha256}
    if name in saved:
        try:
            read_header(path)
            check = "ok" if digest == saved[name] else "damaged"
        except ArtifactError:
            check = "damaged"
    elif name in FILES and name not in (CARD, *COPIED):
        try:
            read_json(path)
            check = "ok"
        except ArtifactError:
            check = "damaged"
    return {"name": name, "bytes": size, "sha256": digest, "check": check}


def print_description(found: Description, out: TextIO) -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    width = min(shutil.get_terminal_size().columns, 100)
    console = titled(out, f"headstart inspect: {found['artifact']}", width)
    parts = (_what(found), _for_whom(found), _how(found), _files(found))
    print_apart(console, *map(grid, parts))
    problems = filter(None, (found["problem"], found.get("misfit")))
    print_apart(console, *problems, style="bold red")


def _what(found: Description) -> list[tuple[str, str]]:
    given = {name: value for name, value in found.get("options", {}).items() if value is not None}
    options = "  ".join(f"{name} {value}" for name, value in given.items())
    rows = [("family", found["family"]), ("made from", found["origin"]), ("options", options)]
    rows.append(("settings left out", ", ".join(found.get("ignored", []))))
    if found.get("tensors"):
        kinds = sorted({tensor["dtype"] for tensor in found["tensors"].values()})
        size = f"{found['parameters']:,}, {decimal(found['bytes'])}, {' '.join(kinds)}"
        rows.append(("parameters", size))
        rows += [(f"  {key}", str(tensor["shape"])) for key, tensor in found["tensors"].items()]
    if "hidden_size" in found:
        names = ["final" if layer == FINAL else str(layer) for layer in found["feature_layers"]]
        rows.append(("feature layers", ", ".join(names) or "none"))
        shape = f"hidden size {found['hidden_size']:,}, vocabulary {found['vocab_size']:,}"
        rows.append(("shaped for", shape))
    return rows


def _for_whom(found: Description) -> list[tuple[str, str]]:
    fits = "" if "fits" not in found else "yes" if found["fits"] else "NO"
    return [
        ("target", found["target"]),
        ("target's fingerprint", found["target_fingerprint"][:12]),
        *_moved(found["metrics"]),
        ("token map's hash", (found["tokenizer_hash"] or "not recorded")[:12]),
        ("fits --target", fits),
    ]


def _moved(metrics: Description) -> list[tuple[str, str]]:
    """How far an adapter moved the target, for a drafter that was trained with one."""
    loss = metrics.get("held_out_loss")
    if not isinstance(loss, dict) or not all(map(_number, map(loss.get, ("base", "adapted")))):
        return []
    if loss["adapted"] == loss["base"]:
        return [("adapted", "not at all: it decoded best before its target began to learn")]
    share = loss["adapted"] / loss["base"] - 1
    moved = f"{loss['base']:.4f} to {loss['adapted']:.4f} nats per token ({share:+.2%})"
    return [("adapted: held-out loss", moved)]


def _how(found: Description) -> list[tuple[str, str]]:
    metrics, recipe, tree = found["metrics"], found["recipe"], found.get("tree")
    tau, depths = metrics.get("tau"), metrics.get("acceptance_by_depth")
    shares = depths if isinstance(depths, list) else []
    shares = [share if _number(share) else None for share in shares]
    corpus = recipe.get("corpus")
    trained = all(_number(metrics.get(name)) for name in ("steps", "seconds"))
    return [
        (
            "tokens per round (τ)",
            f"{tau:.2f}, when it was trained" if _number(tau) else "not measured",
        ),
        ("acceptance at depth 1, 2, …", percentages(shares)),
        ("tree", f"{tree['name']}, {tree['nodes']} nodes" if tree else ""),
        *(("plan", _planned(plan)) for plan in found.get("plans", [])),
        ("recipe", str(recipe.get("name") or "")),
        ("corpus", str(corpus.get("source") or "") if isinstance(corpus, dict) else ""),
        ("training", "{steps} steps, {seconds:.0f} s".format(**metrics) if trained else ""),
        ("versions", "  ".join(f"{k} {v}" for k, v in found["versions"].items())),
    ]


def _planned(plan: Description) -> str:
    said = "plain decoding, nothing pays"
    if not _number(plan["tau"]) or not _number(plan["speedup"]):
        said = "its figures are no numbers"
    elif plan["tree"]:
        said = f"{plan['policy']}, τ {plan['tau']:.2f}, {plan['speedup']:.2f} × plain"
    if not plan["current"]:
        said = f"for other weights, not used ({said})"
    requests = requests_of(plan["batch_size"], plan["temperature"])
    how = ", faster forwards" if plan["compiled"] else ""
    return f"{said}: {plan['device']}, {plan['dtype']}, {requests}{how}"


def _number(value: Any) -> bool:
    """Whether a figure from a file is one that can be printed."""
    return type(value) in (int, float) and abs(value) < 1e15  # nan is not


def _files(found: Description) -> list[tuple[str, str]]:
    checks = {"ok": "ok", "damaged": "NO: damaged", "unchecked": ""}
    rows = []
    for file in found["files"]:
        note = checks[file["check"]] if file["name"] in FILES else "not pushed"
        # The sha256 in full is in the JSON document; a few digits tell two files apart.
        digest = (file["sha256"] or "")[:12]
        rows.append((file["name"], f"{decimal(file['bytes']):>9}  {digest:12}  {note}"))
    missing = [name for name in (CONFIG, WEIGHTS, MANIFEST) if name not in dict(rows)]
    return rows + [(name, "NO: missing") for name in missing]
