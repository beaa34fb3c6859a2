"""The suite's report for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from headstart.reports.tables import column_table, grid, titled

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {
    "expected": "Expected of the rounds timed with random weights, best tree and best chain",
    "decoding": "Decoding the trained target, batch 1: tokens a second, medians",
}


def print_suite(found: Mapping[str, Any], out: TextIO) -> None:
    """Print the report: colours on a terminal, plain text anywhere else."""
    sizes = ", ".join(found["sizes"]) or "nothing measured"
    console = titled(out, f"benchmarks.gpu ({sizes})")
    console.print()
    rows = [("on", f"{of['device']}, {_versions(of)}") for of in found["machines"]]
    rows += [
        (part, f"entries: {of['entries']}, {of['seconds']:.0f} s{_failed(of)}")
        for part, of in found["parts"].items()
    ]
    console.print(grid(rows))
    console.print()
    console.print(_judged(found["thresholds"]))
    for title, table in (("expected", _worth(found["expected"])), ("decoding", _decoded(found))):
        if table.row_count:
            console.print()
            console.print(_TITLES[title], style="bold")
            console.print(table)
    for said in _remarks(found):
        console.print()
        console.print(said, style="yellow")
    if found["plot"]:
        print(f"\nThe plot is {found['plot']}", file=out)
    print(f"\nThe files are in {found['folder']}", file=out)


def _judged(readings: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each threshold, and under it one for each of its readings."""
    table = _table(("", "threshold"), ("value", "limit"), ("",))
    before = ""
    for reading in readings:
        value = "–" if reading["value"] is None else f"{reading['value']:.3f}"
        said = reading["status"] + (" (expected)" if reading["expected"] else "")
        style = "bold red" if reading["status"] == "missed" else None
        line = [value, reading["limit"], said]
        if not reading["of"]:
            table.add_row(reading["threshold"], reading["what"], *line)
            continue
        if reading["threshold"] != before:
            table.add_row(reading["threshold"], reading["what"])
        table.add_row("", f"  {reading['of']}", *line, style=style)
        before = reading["threshold"]
    return table


def _worth(worth: Mapping[str, Any]) -> Table:
    table = _table(("at", "drafter", "tree"), ("nodes", "τ", "efficiency", "× plain"))
    for part in ("costs-1b", "costs-8b"):
        for family, kinds in worth.get(part, {}).items():
            for of in kinds.values():
                figures = [f"{of[key]:.2f}" for key in ("tau", "efficiency", "speedup")]
                shape = part.removeprefix("costs-")
                table.add_row(shape, family, of["tree"], str(of["nodes"]), *figures)
    return table


def _decoded(found: Mapping[str, Any]) -> Table:
    whos = list(dict.fromkeys(w for of in found["decoding"].values() for w in of["same_text"]))
    table = _table(("drafter",), [who.replace("_", " ") for who in whos], ("same text",))
    for family, of in found["decoding"].items():
        speeds = [of["tokens_per_second"].get(who) for who in whos]
        differ = [who for who, same in of["same_text"].items() if not same]
        said = f"not {', '.join(differ)}" if differ else "all"
        table.add_row(family, *(f"{speed:.0f}" if speed else "–" for speed in speeds), said)
    return table


def _table(names: Sequence[str], figures: Sequence[str], last: Sequence[str] = ()) -> Table:
    """An empty table: names on the left, figures to the right, and more names."""
    table = column_table(names, (), gap=1)
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _remarks(found: Mapping[str, Any]) -> list[str]:
    said = []
    if "toy" in found["sizes"]:
        said.append("Toy sizes show that everything runs; no figure of them says anything.")
    if len(found["machines"]) > 1:
        said.append("The parts come from different machines; do not compare across them.")
    if found["mixed"]:
        said.append(
            f"Trained anew between parts: {', '.join(found['mixed'])}; measure acceptance again."
        )
    if found["expected"]:
        said.append(
            "Expected: rounds timed with random weights, times the acceptance of the trained "
            "target's drafters; not a measured speedup."
        )
    return said


def _versions(of: Mapping[str, Any]) -> str:
    wanted = ("torch", "transformers")
    parts = [f"{name} {of['versions'][name]}" for name in wanted if name in of["versions"]]
    return ", ".join([*parts, *([f"driver {of['driver']}"] if of.get("driver") else [])])


def _failed(of: Mapping[str, Any]) -> str:
    return f", FAILED: {'; '.join(of['errors'])}" if of["errors"] else ""
