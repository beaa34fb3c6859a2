"""What `headstart doctor` prints: acceptance, and what it suffers from, in at most 80 columns."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from headstart.heads.core import counted
from headstart.terminal import visible

from .measured import percentages
from .tables import grid, print_apart, titled

if TYPE_CHECKING:
    from headstart.doctor.diagnosis import Diagnosis, Finding

_WIDTH = 80


def print_diagnosis(found: Diagnosis, out: TextIO, title: str) -> None:
    """Print acceptance and findings to `out`: colours on a terminal, plain text anywhere else."""
    console = titled(out, title, min(shutil.get_terminal_size().columns, _WIDTH))
    print_apart(console, grid(_acceptance(found.measured)), grid(_places(found.measured)))
    if found.causes:
        _section(console, "Causes, the costliest first", found.causes, "bold red")
    else:
        print_apart(
            console,
            "No cause was found: nothing tried raises acceptance beyond noise.",
            style="green",
        )
        if not found.unmeasured:
            print_apart(
                console,
                "Where τ is lower than you need: train longer, on more text like these prompts, "
                "or plan a tree for it (headstart plan).",
            )
    _section(console, "Differs, and what it costs was not measured", found.unmeasured)
    _section(console, "Differs, and costs nothing beyond noise", found.harmless)
    if found.tried:
        names = "; ".join(f"{each.cause} ({each.by})" for each in found.tried if each.by)
        print_apart(console, f"Tried as well, without gain: {names}.", style="dim")


def _acceptance(measured: dict[str, Any]) -> list[tuple[str, str]]:
    trained, rows = measured["trained"] or {}, []
    if trained.get("tau"):
        shares = percentages(trained.get("acceptance_by_depth") or ())
        rows.append(("after training, validation", f"τ {trained['tau']:.2f}   {shares}"))
    for name in ("temperature 0", "temperature 1"):
        label, of = f"here, {name}", measured[name]
        if of["tau"] is not None:
            rows.append((label, f"τ {of['tau']:.2f}   {percentages(of['by_depth'])}"))
    left_out = measured["left_out"]
    prompts = f"{measured['prompts']}" + (f", {left_out} left out" if left_out else "")
    return [*rows, ("prompts, chain", f"{prompts}; {counted(measured['depth'], 'token')} deep")]


def _places(measured: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("τ of an answer's first round", f"{measured['first_round']:.2f}")]
    for part in measured["by_position"]:
        rows.append((f"τ at positions {part['from']}–{part['to']}", f"{part['tau']:.2f}"))
    if len(measured["by_category"]) > 1:
        for name, tau in measured["by_category"].items():
            rows.append((f"τ of {visible(name)[:24]}", f"{tau:.2f}"))
    return rows


def _section(
    console: Console, title: str, findings: Sequence[Finding], style: str = "bold"
) -> None:
    if not findings:
        return
    print_apart(console, title, style=style)
    for number, each in enumerate(findings, 1):
        gain = ""
        if each.gain is not None and math.isfinite(each.gain.se):
            gain = f": {each.gain.tau:+.2f} ± {each.gain.se:.2f} tokens per round"
            gain += f" with {each.by}" if each.by else ""
        item = Table.grid()
        item.add_row(f"  {number}. ", f"{each.cause}{gain}")
        for text in filter(None, (each.said, each.advice)):
            item.add_row("", visible(text[:400]))
        console.print(item)
