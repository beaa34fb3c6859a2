"""The table of `headstart inspect`: what `describe` found, for people."""

from __future__ import annotations

import shutil
from typing import TextIO

from rich.filesize import decimal

from headstart.heads.artifacts.files import CONFIG, FILES, MANIFEST, WEIGHTS
from headstart.heads.core import FINAL

from .console import grid, titled
from .describe import Description
from .measured import percentages
from .plans import at_once


def print_description(found: Description, out: TextIO) -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
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
        rows.append(("acceptance at depth 1, 2, …", percentages(shares)))
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
        rows.append((file["name"], f"{decimal(file['bytes']):>9}  {file['sha256'][:12]}  {note}"))
    missing = [name for name in (CONFIG, WEIGHTS, MANIFEST) if name not in dict(rows)]
    return rows + [(name, "NO: missing") for name in missing]
