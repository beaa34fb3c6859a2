"""What an artifact is, from its files alone: a document, or a table for people."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, TextIO

from headstart.heads import DrafterConfig, family
from headstart.heads.artifacts.files import (
    CARD,
    CONFIG,
    FILES,
    MANIFEST,
    WEIGHTS,
    artifact_folder,
    check_files,
    check_target,
    read_manifest,
    read_tree,
)
from headstart.heads.artifacts.manifest import Manifest, sha256
from headstart.heads.core import FINAL, ArtifactError
from headstart.heads.parts.adapter import ADAPTER, ADAPTER_WEIGHTS

Description = dict[str, Any]


def describe(name: str | Path) -> Description:
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
    folder = artifact_folder(name)
    manifest = read_manifest(folder)
    found: Description = {"artifact": str(name), "folder": str(folder), "problem": None}
    found |= {
        "family": manifest.family,
        "origin": manifest.origin or None,
        "target": manifest.target,
        "target_fingerprint": manifest.target_fingerprint,
        "tokenizer_hash": manifest.tokenizer_hash or None,
    }
    for part in (_config, _weights, _tree, _plans):
        try:
            found |= part(folder, manifest)
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


def fits(description: Description, target: Any, tokenizer: Any) -> str | None:
    """None where the drafter was trained for this target and tokenizer, else why not."""
    folder = Path(description["folder"])
    try:
        check_target(read_manifest(folder), target, tokenizer, folder)
    except ArtifactError as error:
        return str(error)
    return None


def _config(folder: Path, manifest: Manifest) -> Description:
    kind = family(manifest.family).config_class
    assert kind is not None and issubclass(kind, DrafterConfig)
    config: Any = kind.from_pretrained(folder, local_files_only=True)
    return {
        "options": {option: getattr(config, option) for option in kind.OPTIONS},
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "feature_layers": list(config.feature_layers),
    }


def _weights(folder: Path, manifest: Manifest) -> Description:
    """Names, shapes and types from the header; the tensors are not read."""
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        tensors = {key: {"shape": t["shape"], "dtype": t["dtype"]} for key, t in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError):
        return {}  # `check_files` says so
    whole = [math.prod(t["shape"]) for t in tensors.values() if t["dtype"].startswith(("F", "BF"))]
    return {"tensors": tensors, "parameters": sum(whole), "bytes": path.stat().st_size}


def _tree(folder: Path, manifest: Manifest) -> Description:
    from headstart.infer import StaticTree

    paths = read_tree(folder)
    if paths is None:
        return {"tree": None}
    tree = StaticTree(paths)
    return {"tree": {"name": tree.label, "nodes": tree.nodes, "depth": tree.max_depth}}


def _plans(folder: Path, manifest: Manifest) -> Description:
    from headstart.heads.artifacts.plan import read_plans

    long = ("acceptance", "costs", "candidates", "weights_sha256")
    plans = []
    for plan in read_plans(folder):
        shown = {name: value for name, value in vars(plan).items() if name not in long}
        plans.append(shown | {"current": plan.weights_sha256 == manifest.weights_sha256})
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


def print_description(found: Description, out: TextIO) -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    from headstart.reports.tables import grid, titled

    width = min(shutil.get_terminal_size().columns, 100)
    console = titled(out, f"headstart inspect: {found['artifact']}", width)
    for rows in (_what(found), _for_whom(found), _how(found), _files(found)):
        if rows:
            console.print()
            console.print(grid(rows))
    for problem in filter(None, (found["problem"], found.get("misfit"))):
        console.print()
        console.print(problem, style="bold red")


def _what(found: Description) -> list[tuple[str, str]]:
    rows = [("family", found["family"])]
    if found["origin"]:
        rows.append(("made from", found["origin"]))
    if found.get("options"):
        rows.append(("options", "  ".join(f"{k} {v}" for k, v in found["options"].items())))
    if found.get("tensors"):
        kinds = sorted({tensor["dtype"] for tensor in found["tensors"].values()})
        size = f"{found['parameters']:,}, {_size(found['bytes'])}, {' '.join(kinds)}"
        rows.append(("parameters", size))
        rows += [(f"  {key}", str(tensor["shape"])) for key, tensor in found["tensors"].items()]
    if "hidden_size" in found:
        names = ["final" if layer == FINAL else str(layer) for layer in found["feature_layers"]]
        rows.append(("feature layers", ", ".join(names) or "none"))
        shape = f"hidden size {found['hidden_size']:,}, vocabulary {found['vocab_size']:,}"
        rows.append(("shaped for", shape))
    return rows


def _for_whom(found: Description) -> list[tuple[str, str]]:
    rows = [
        ("target", found["target"]),
        ("target's fingerprint", found["target_fingerprint"][:12]),
        *_moved(found["metrics"]),
        ("token map's hash", (found["tokenizer_hash"] or "not recorded")[:12]),
    ]
    if "fits" in found:
        rows.append(("fits --target", "yes" if found["fits"] else "NO"))
    return rows


def _moved(metrics: Description) -> list[tuple[str, str]]:
    """How far an adapter moved the target, for a drafter that was trained with one."""
    loss = metrics.get("held_out_loss")
    if not isinstance(loss, dict):
        return []
    if loss["adapted"] == loss["base"]:
        return [("adapted", "not at all: it decoded best before its target began to learn")]
    share = loss["adapted"] / loss["base"] - 1
    moved = f"{loss['base']:.4f} to {loss['adapted']:.4f} nats a token ({share:+.2%})"
    return [("adapted: held-out loss", moved)]


def _how(found: Description) -> list[tuple[str, str]]:
    rows, metrics, recipe = [], found["metrics"], found["recipe"]
    if isinstance(metrics.get("tau"), int | float):
        rows.append(("tokens per round (τ)", f"{metrics['tau']:.2f}, when it was trained"))
    else:
        rows.append(("tokens per round (τ)", "not measured"))
    if shares := metrics.get("acceptance_by_depth"):
        each = "  ".join("–" if share is None else f"{share:.0%}" for share in shares)
        rows.append(("acceptance at depth 1, 2, …", each))
    if tree := found.get("tree"):
        rows.append(("tree", f"{tree['name']}, {tree['nodes']} nodes"))
    rows += [("plan", _planned(plan)) for plan in found.get("plans", [])]
    if recipe.get("name"):
        rows.append(("recipe", str(recipe["name"])))
    if source := (recipe.get("corpus") or {}).get("source"):
        rows.append(("corpus", str(source)))
    if "steps" in metrics and "seconds" in metrics:
        rows.append(("training", f"{metrics['steps']} steps, {metrics['seconds']:.0f} s"))
    rows.append(("versions", "  ".join(f"{k} {v}" for k, v in found["versions"].items())))
    return rows


def _planned(plan: Description) -> str:
    from headstart.reports.plans import at_once

    said = "plain decoding, nothing pays"
    if plan["tree"]:
        said = f"{plan['policy']}, τ {plan['tau']:.2f}, {plan['speedup']:.2f} × plain"
    if not plan["current"]:
        said = f"for other weights, not used ({said})"
    return f"{said}: {plan['device']}, {plan['dtype']}, {at_once(plan['batch_size'])}"


def _files(found: Description) -> list[tuple[str, str]]:
    checks = {"ok": "ok", "damaged": "NO: damaged", "unchecked": ""}
    rows = []
    for file in found["files"]:
        note = checks[file["check"]] if file["name"] in FILES else "not pushed"
        # The sha256 in full is in the JSON document; a few digits tell two files apart.
        rows.append((file["name"], f"{_size(file['bytes']):>9}  {file['sha256'][:12]}  {note}"))
    missing = [name for name in (CONFIG, WEIGHTS, MANIFEST) if name not in dict(rows)]
    return rows + [(name, "NO: missing") for name in missing]


def _size(count: int) -> str:
    """A number of bytes for people.

    >>> _size(512), _size(12_848), _size(3_400_000_000)
    ('512 B', '12.8 kB', '3.4 GB')
    """
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
