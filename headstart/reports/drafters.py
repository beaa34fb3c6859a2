"""Every drafter family on one target: the table of `quickstart --drafter all`, and its plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .comparison import comparison_row, print_shared
from .console import column_table, titled
from .document import Report
from .measured import print_next_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLOT = "drafters.png"


def print_drafters(reports: Mapping[str, Report], plot: Path | None, out: TextIO) -> None:
    """Print a line for each drafter, why any failed, where the plot is and what to try next."""
    console = titled(out, "headstart quickstart: drafters on the target of quickstart")
    console.print()
    figures = ("nodes", "τ", "ms/round", "× plain", "× gen.", "same", "size", "train")
    table = column_table(("drafter", "tree"), figures, gap=1)
    table.columns[0].no_wrap = True
    for drafter, report in reports.items():
        table.add_row(drafter, *_row(report), style="bold red" if "error" in report else None)
    console.print(table)
    console.print("× gen.: against generate; same: as both; size: parameters", style="dim")
    measured = _measured(reports)
    if measured:
        print_shared(list(measured.values()), console)
    for drafter, report in reports.items():
        if "error" in report:
            console.print()
            console.print(f"{drafter} failed: {report['error']}", style="bold red")
    if plot is not None:
        print(f"\nThe plot is {plot}", file=out)
    elif measured:
        print("\nNo plot: it needs matplotlib (pip install 'headstart[plot]')", file=out)
    if measured:
        fastest = max(measured, key=lambda name: measured[name]["speedup_vs_plain"]["median"])
        print(f"\nThe fastest is {fastest}.", end="", file=out)
        print_next_steps(measured[fastest], out)


def _row(report: Report) -> list[str]:
    if "error" in report:
        return ["failed", *["–"] * 8]
    tree, _, *figures = comparison_row(report)
    return [tree, *figures, _short(report["parameters"]), f"{report['train_seconds']:.0f} s"]


def _short(count: int) -> str:
    """A count in few characters.

    >>> [_short(n) for n in (0, 980, 82_560, 1_410_000, 7_000_000_000)]
    ['0', '980', '83k', '1.4M', '7.0B']
    """
    for size, unit, digits in ((1e9, "B", 1), (1e6, "M", 1), (1e3, "k", 0)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def _measured(reports: Mapping[str, Report]) -> dict[str, Report]:
    return {name: report for name, report in reports.items() if "error" not in report}


def draw_drafters(reports: Mapping[str, Report], folder: Path) -> Path | None:
    """Draw speedups, and tokens against the cost of a round, into an image in `folder`.

    Returns:
        The image; None where matplotlib is missing or nothing was measured.
    """
    measured = _measured(reports)
    if not measured or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_speedups(left, measured)
    _draw_rounds(right, measured)
    path = folder / _PLOT
    figure.savefig(path, dpi=150)
    return path


def _draw_speedups(axes: Axes, reports: Mapping[str, Report]) -> None:
    """Bars of the median speedups, whiskers from the slowest prompt to the fastest."""
    for side, rival in enumerate(("plain", "generate")):
        known = [
            (place, report[f"speedup_vs_{rival}"])
            for place, report in enumerate(reports.values())
            if report.get(f"speedup_vs_{rival}")
        ]
        places = [place + 0.38 * side for place, _ in known]
        middle = [of["median"] for _, of in known]
        spans = [[of["median"] - of["min"] for _, of in known]]
        spans.append([of["max"] - of["median"] for _, of in known])
        axes.bar(places, middle, 0.36, yerr=spans, capsize=3, label=f"against {rival}")
        for place, height in zip(places, middle, strict=True):
            axes.annotate(f"{height:.2f}", (place, 0), (0, 3), textcoords="offset points",
                          ha="center", color="white", fontsize="small")  # fmt: skip
    axes.axhline(1, color="gray", linestyle=":")
    axes.set_xticks([place + 0.19 for place in range(len(reports))], list(reports))
    axes.set_ylabel("times as fast (median prompt, slowest to fastest)")
    axes.legend(fontsize="small")


def _draw_rounds(axes: Axes, reports: Mapping[str, Report]) -> None:
    """A point for each drafter; on a line through the origin the speedup is the same."""
    costs = [report["ms_per_round"] / report["plain_ms_per_token"] for report in reports.values()]
    taus = [report["tau"] for report in reports.values()]
    wide, high = 1.4 * max(costs), 1.2 * max(taus)
    for speedup in (1, 2, 3, 4, 6, 8):
        end = min(wide, high / speedup)
        axes.plot([0, end], [0, speedup * end], color="lightgray", lw=1, zorder=0)
        axes.annotate(f"{speedup}×", (end, speedup * end), color="gray", fontsize="small",
                      ha="right", va="top")  # fmt: skip
    for number, (name, cost, tau) in enumerate(zip(reports, costs, taus, strict=True)):
        axes.plot(cost, tau, "o", color=f"C{number}")
        axes.annotate(name, (cost, tau), (6, 4), textcoords="offset points")
    axes.set_title("gray lines: the same speedup against plain", fontsize="small")
    axes.set_xlim(0, wide)
    axes.set_ylim(0, high)
    axes.set_xlabel("cost of a round, in tokens of plain decoding")
    axes.set_ylabel("tokens a round, τ")
