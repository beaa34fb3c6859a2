"""A plan for people: the table of candidates, what is expected in plain words, and the plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headstart.reports.tables import grid, titled

if TYPE_CHECKING:
    from headstart.heads.artifacts.plan import Plan

_SHOWN = 12  # candidates in the table
_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before anything is measured for it.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be what it is named.
    """
    if path.suffix not in _FORMATS or not path.parent.is_dir():
        raise ValueError(
            f"--plot is {str(path)!r}; expected a file in an existing folder, named "
            f"{', '.join(_FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install 'headstart[plot]'"
        )


def print_plan(plan: Plan, out: TextIO, title: str = "headstart plan") -> None:
    """Print candidates, costs and the choice: colours on a terminal, plain text anywhere else."""
    from rich.table import Table

    console = titled(out, title)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("tree", overflow="fold")
    for name in ("nodes", "depth", "τ", "ms/round", "× plain", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in plan.candidates[:_SHOWN]:
        chosen = candidate["name"] == plan.policy
        table.add_row(*_row(candidate), style="bold green" if chosen else None)
    console.print(table)
    if more := len(plan.candidates) - _SHOWN:
        console.print(f"  … and {more} slower ones" if more > 0 else "", style="dim")
    console.print()
    console.print(grid(_cost_rows(plan)))
    for sentence in sentences(plan):
        console.print()
        console.print(sentence)


def sentences(plan: Plan) -> list[str]:
    """What the plan expects, and what that holds for."""
    where = f"On this machine ({plan.device}, {plan.dtype}, {at_once(plan.batch_size)})"
    best = plan.candidates[0]
    fast = _times(best)
    if plan.tree:
        said = (
            f"{where}, {plan.policy} decodes fastest: it is expected to write {plan.tau:.2f} "
            f"tokens a round and to decode {fast} as fast as plain decoding."
        )
    else:
        said = (
            f"{where}, nothing pays: the best tree, {best['name']}, decodes {fast} as fast as "
            "plain decoding. The plan is to decode plainly."
        )
    return [
        said,
        f"It holds for text like these {plan.prompts} prompts, written greedily: the ranks were "
        "recorded on greedy text, and at a temperature above 0 fewer drafted tokens are right.",
    ]


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw speedup against tree size, expected and measured, into an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    families: dict[str, list[dict[str, Any]]] = {}
    for candidate in sorted(plan.candidates, key=lambda each: each["nodes"]):
        families.setdefault(candidate["name"].partition(":")[0], []).append(candidate)
    for number, (family, members) in enumerate(families.items()):
        # A size may be there at several depths: the line follows the best of them.
        best = {c["nodes"]: c for c in sorted(members, key=lambda each: each["speedup"])}
        line = [best[nodes] for nodes in sorted(best)]
        nodes, speedup = [c["nodes"] for c in line], [c["speedup"] for c in line]
        style = "o" if family == "cartesian" else "o-"
        axes.plot(nodes, speedup, style, color=f"C{number}", label=f"{family}, expected", ms=4)
    measured = [c for c in plan.candidates if c["measured_speedup"] is not None]
    if measured:
        nodes = [c["nodes"] for c in measured]
        axes.plot(
            nodes, [c["measured_speedup"] for c in measured], "kx", label="measured", ms=7, zorder=3
        )
    axes.axhline(1, color="gray", linestyle=":", label="plain decoding")
    best = plan.candidates[0]
    if plan.tree:
        height = best["speedup"] if best["measured_speedup"] is None else best["measured_speedup"]
        axes.annotate(
            f"chosen: {plan.policy}", (best["nodes"], height), (0, 18), va="bottom", ha="left",
            textcoords="offset points", arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    sizes = sorted({c["nodes"] for c in plan.candidates})
    axes.set_xscale("log", base=2)
    axes.set_xticks([size for size in sizes if size & (size - 1) == 0])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.set_xlabel("nodes of the tree, the root counted")
    axes.set_ylabel("speedup against plain decoding")
    axes.set_title(f"{plan.device}, {plan.dtype}, {at_once(plan.batch_size)}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower center", ncols=2)
    figure.savefig(path, dpi=150)


def _row(candidate: dict[str, Any]) -> list[str]:
    measured = candidate["measured_speedup"]
    return [
        candidate["name"],
        str(candidate["nodes"]),
        str(candidate["depth"]),
        f"{candidate['tau']:.2f}",
        f"{candidate['round_ms']:.2f}",
        f"{candidate['speedup']:.2f}",
        "–" if measured is None else f"{measured:.2f}",
    ]


def _cost_rows(plan: Plan) -> list[tuple[str, str]]:
    costs = plan.costs
    rows = [
        ("a plain round", f"{costs['plain']:.2f} ms"),
        ("verifying n nodes", _by_size(costs["verify"])),
        ("drafting: begin", f"{costs['begin']:.2f} ms"),
    ]
    if costs["extend"]:
        rows.append(("drafting: a level of n nodes", _by_size(costs["extend"])))
    rows.append(("prompts, new tokens", f"{plan.prompts}, {plan.new_tokens} each"))
    return rows


def _by_size(costs: dict[Any, float]) -> str:
    sizes = list(costs)
    shown: Sequence[Any] = [size for size in sizes if int(size) & (int(size) - 1) == 0]
    return "  ".join(f"{size}: {costs[size]:.2f}" for size in shown) + " ms"


def _times(candidate: dict[str, Any]) -> str:
    """How many times as fast, in words; the measured figure where there is one.

    >>> _times({"speedup": 2.5, "measured_speedup": None})
    '2.50 times'
    >>> _times({"speedup": 2.5, "measured_speedup": 2.4})
    '2.50 times (measured: 2.40 times)'
    """
    measured = candidate["measured_speedup"]
    real = "" if measured is None else f" (measured: {measured:.2f} times)"
    return f"{candidate['speedup']:.2f} times{real}"


def at_once(batch_size: int) -> str:
    """How many prompts are decoded together, in words."""
    return "one prompt at a time" if batch_size == 1 else f"{batch_size} prompts at a time"
