"""Several measured runs on the same prompts and target: one table with a line for each.

Runs are of trees and rules (`bench`), or of drafter families (`quickstart --drafter all`), which
are also plotted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .measured import print_next_steps, print_remarks, rule_name, setting_rows, shown, tree_name
from .tables import Report, column_table, grid, print_apart, titled, to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console


def print_comparison(
    reports: Sequence[Report],
    out: TextIO,
    title: str,
    as_json: bool = False,
    notes: Sequence[str] = (),
) -> None:
    """Print the document, or a line for each report."""
    if as_json:
        print(to_json({"runs": reports, "notes": notes}), file=out)
        return
    more = [key for key in _VARIED if len({report.get(key) for report in reports}) > 1]
    others = [key for key in _OTHERS if f"speedup_vs_{key}" in reports[0]]
    brief = len(more) + len(others) > 2  # what does not fit into 80 columns is left out
    names = [*(_VARIED[key] for key in more), "tree", "rule"]
    figures = ["nodes", "τ", "ms/round", "× plain", *(f"× {key}" for key in others), "same"]
    if brief:
        names.remove("rule")
        figures[:] = ["τ", "× plain", *(f"× {key[:4]}." for key in others), "same"]
    table = column_table(names, figures, gap=1 if brief else 2)
    for report in reports:
        tree, rule, nodes, tau, round_ms, *rest = _row(report, others)
        figures = [tau, *rest] if brief else [rule, nodes, tau, round_ms, *rest]
        table.add_row(*(str(report.get(key)) for key in more), tree, *figures)
    console = titled(out, title)
    print_apart(console, table)
    if any(_unsure(report, "plain") for report in reports):
        console.print("~: within noise, the 95% interval of the median holds 1", style="dim")
    _print_shared(reports, console)


_VARIED = {"drafter": "drafter", "temperature": "T", "batch_size": "batch"}
_OTHERS = ("generate", "assistant", "lookup")


def _row(report: Report, others: Sequence[str] = ("generate",)) -> list[str]:
    """tree, rule, nodes, τ, ms per round, median speedups, whether all outputs agree."""
    same = [report.get(f"identical_to_{name}") for name in ("plain", "generate")]
    return [
        tree_name(report),
        rule_name(report),
        str(report["nodes"]),
        *(shown(report, key, "{:.2f}") or "–" for key in ("tau", "ms_per_round")),
        *(_speedup(report, name) for name in ("plain", *others)),
        "NO" if False in same else "yes" if True in same else "–",
    ]


def _speedup(report: Report, name: str) -> str:
    of = report.get(f"speedup_vs_{name}")
    return f"{'~' if _unsure(report, name) else ''}{of['median']:.2f}" if of else "–"


def _unsure(report: Report, name: str) -> bool:
    return bool((report.get(f"speedup_vs_{name}") or {}).get("within_noise"))


def _print_shared(reports: Sequence[Report], console: Console) -> None:
    """Print the settings that compared runs share, and every remark once."""
    shared = {key: reports[0].get(key) for key in ("dtype", "prompts", "tokens", "threads")}
    print_apart(console, grid(setting_rows(shared)))
    print_remarks(reports, console)


def print_drafters(reports: Mapping[str, Report], plot: Path | None, out: TextIO) -> None:
    """Print a line for each drafter, why any failed, where the plot is and what to try next."""
    figures = ("nodes", "τ", "ms/round", "× plain", "× gen.", "same", "size", "train")
    table = column_table(("drafter", "tree"), figures, gap=1)
    table.columns[0].no_wrap = True
    for drafter, report in reports.items():
        if "error" in report:
            table.add_row(drafter, "failed", *["–"] * 8, style="bold red")
            continue
        tree, _, *row = _row(report)
        trained = f"{report['train_seconds']:.0f} s"
        table.add_row(drafter, tree, *row, _short(report["parameters"]), trained)
    console = titled(out, "headstart quickstart: drafters on the target of quickstart")
    print_apart(console, table)
    console.print("× gen.: against generate; same: as both; size: parameters", style="dim")
    measured = _measured(reports)
    if measured:
        _print_shared(list(measured.values()), console)
    failed = [f"{name} failed: {of['error']}" for name, of in reports.items() if "error" in of]
    print_apart(console, *failed, style="bold red")
    if plot is not None:
        print(f"\nThe plot is {plot}", file=out)
    elif measured:
        print("\nNo plot: it needs matplotlib (pip install 'headstart[plot]')", file=out)
    if measured:
        fastest = max(measured, key=lambda name: measured[name]["speedup_vs_plain"]["median"])
        print(f"\nThe fastest is {fastest}.", end="", file=out)
        print_next_steps(measured[fastest], out)


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
    """Draw speedups and costs into an image; None without matplotlib or anything measured."""
    measured = _measured(reports)
    if not measured or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_speedups(left, measured)
    _draw_rounds(right, measured)
    path = folder / "drafters.png"
    figure.savefig(path, dpi=150)
    return path


def _draw_speedups(axes: Axes, reports: Mapping[str, Report]) -> None:
    """Bars of the median speedups, whiskers from the slowest prompt to the fastest."""
    for side, baseline in enumerate(("plain", "generate")):
        each = [report.get(f"speedup_vs_{baseline}") for report in reports.values()]
        known = {place + 0.38 * side: of for place, of in enumerate(each) if of}
        middle = [of["median"] for of in known.values()]
        spans = [
            [of["median"] - of["min"] for of in known.values()],
            [of["max"] - of["median"] for of in known.values()],
        ]
        axes.bar(list(known), middle, 0.36, yerr=spans, capsize=3, label=f"against {baseline}")
        for place, height in zip(known, middle, strict=True):
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
    axes.set(xlim=(0, wide), ylim=(0, high), ylabel="tokens a round, τ")
    axes.set_xlabel("cost of a round, in tokens of plain decoding")
