"""Several measured runs on the same prompts and target: one table with a line for each.

Runs are of trees and rules (`bench`), or of drafter families (`quickstart --drafter all`), which
are also plotted.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, TextIO

from .measured import (
    faster_forwards,
    labelled,
    print_next_steps,
    print_remarks,
    rule_name,
    setting_rows,
    shown,
    tree_name,
)
from .tables import Report, column_table, grid, print_apart, titled, to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table


_CALLED = {
    "plain": "plain decoding",
    "generate": "generate",
    "assistant": "generate with assistant_model",
    "lookup": "generate with prompt lookup",
}


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
    others = [key for key in _OTHERS if any(f"speedup_vs_{key}" in of for of in reports)]
    told = [(*map(report.get, more), tree_name(report)) for report in reports]
    console = titled(out, title)
    table, ruled, below = _table(reports, more, others), True, False
    whole = console.measure(table, options=console.options.update(width=10_000)).maximum
    if whole > console.width and len(more) + len(others) > 2:
        ruled = len(set(told)) < len(told)  # some runs differ in the rule alone
        short = _short_rules(reports)
        below = not ruled or set(short) != {rule_name(report) for report in reports}
        table = _brief_table(reports, more, others, short if ruled else None)
    print_apart(console, table)
    _explain_noise(reports, console)
    _print_shared(reports, console, rules=below)


def _table(reports: Sequence[Report], more: Sequence[str], others: Sequence[str]) -> Table:
    names = [*(_VARIED[key] for key in more), "tree", "rule"]
    figures = ["nodes", "τ", "ms/round", "× plain", *(f"× {key}" for key in others), "same"]
    table = column_table(names, figures)
    for report in reports:
        table.add_row(*_place(report, more), *_row(report, others))
    return table


def _brief_table(
    reports: Sequence[Report],
    more: Sequence[str],
    others: Sequence[str],
    rules: Sequence[str] | None,
) -> Table:
    """Without what the other columns nearly tell, for 80 columns of text."""
    names = [*(_VARIED[key] for key in more), "tree", *(["rule"] if rules else [])]
    figures = ["τ", "× plain", *(f"× {_SHORT[key]}" for key in others), "same"]
    table = column_table(names, figures, gap=1)
    for number, report in enumerate(reports):
        tree, _, _, tau, _, *rest = _row(report, others)
        told = [*_place(report, more), tree, *([rules[number]] if rules else [])]
        table.add_row(*told, tau, *rest)
    return table


def _short_rules(reports: Sequence[Report]) -> list[str]:
    """The rules' names, without the expansion where each rule was measured with only one."""
    whole = list(map(rule_name, reports))
    names = [
        str(report["rule"]) if report.get("exact", True) else name
        for report, name in zip(reports, whole, strict=True)
    ]
    return names if len(set(names)) == len(set(whole)) else whole


def _place(report: Report, more: Sequence[str]) -> list[str]:
    """What tells a run from the others, in the order of the columns."""
    found = [report.get(key) for key in more]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in found]


_VARIED = {"drafter": "drafter", "temperature": "T", "batch_size": "batch"}
_OTHERS = ("generate", "assistant", "lookup")
_SHORT = {"generate": "gen.", "assistant": "assist.", "lookup": "lookup"}


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


def _explain_noise(reports: Iterable[Report], console: Console) -> None:
    if any(_unsure(report, "plain") for report in reports):
        console.print("~: within noise, the 95% interval of the median contains 1", style="dim")


def _unsure(report: Report, name: str) -> bool:
    return bool((report.get(f"speedup_vs_{name}") or {}).get("within_noise"))


def _print_shared(reports: Sequence[Report], console: Console, rules: bool = True) -> None:
    """Print the settings that compared runs share, the rules where asked, every remark once."""
    names = ("dtype", "forwards", "prompts", "tokens", "threads", "processes")
    rows = setting_rows({key: reports[0].get(key) for key in names})
    if rules:
        rows.insert(0, ("rule", ", ".join(dict.fromkeys(map(rule_name, reports)))))
    print_apart(console, grid(rows))
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
    said = "× gen.: against generate; same: output identical to both; size: parameters"
    console.print(said, style="dim")
    _explain_noise(reports.values(), console)
    measured = _measured(reports)
    if measured:
        _print_shared(list(measured.values()), console)
    failed = [f"{name} failed: {of['error']}" for name, of in reports.items() if "error" in of]
    print_apart(console, *failed, style="bold red")
    if plot is not None:
        print(f"\nThe plot is {plot}", file=out)
    elif measured:
        print("\nNo plot: it needs matplotlib (pip install matplotlib)", file=out)
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

    names = sorted(measured, key=lambda name: -measured[name]["speedup_vs_plain"]["median"])
    rows = [measured[name] for name in names]
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1.6, 1, 1))
    _draw_speedups(left, rows)
    errors = [_tau_error(report) for report in rows]
    _draw_bars(middle, [report["tau"] for report in rows], errors, "C0")
    middle.set_title("tokens per round, τ", loc="left", fontsize="medium")
    costs = [report["ms_per_round"] / report["plain_ms_per_token"] for report in rows]
    _draw_bars(right, costs, None, "C7")
    right.set_title("cost of a round, in plain tokens", loc="left", fontsize="medium")
    shares = [shown(report, "distinct_4grams", "{:.0%}") or "–" for report in rows]
    labels = [f"{name}\n{share} distinct" for name, share in zip(names, shares, strict=True)]
    left.set_yticks(range(len(rows)), labels)
    left.set_ylim(len(rows) - 0.4, -0.6)
    for axes in (left, middle, right):
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    first = rows[0]
    figure.suptitle(
        f"Drafters on one target. Prompts: {first['prompts']}; {first['dtype']}; threads: "
        f"{first['threads']}. Distinct: share of the text's 4-grams."
        f"{f' All but generate with {faster}.' if (faster := faster_forwards(first)) else ''}",
        x=0.01, ha="left", fontsize="large",
    )  # fmt: skip
    path = folder / "drafters.png"
    figure.savefig(path, dpi=150)
    return path


def _draw_speedups(axes: Axes, rows: Sequence[Report]) -> None:
    """The median speedups with their 95% intervals, or from the slowest prompt to the fastest."""
    sure = all(of.get("low") is not None for row in rows for of in [row["speedup_vs_plain"]])
    most = 1.0
    for side, (baseline, color) in enumerate((("plain", "C0"), ("generate", "C1"))):
        known = [(n, row.get(f"speedup_vs_{baseline}")) for n, row in enumerate(rows)]
        for n, of in known:
            if of is None:
                continue
            place = n + 0.36 * side - 0.18
            low, high = (of["low"], of["high"]) if sure else (of["min"], of["max"])
            spans = [[of["median"] - low], [high - of["median"]]]
            axes.errorbar(of["median"], place, xerr=spans, fmt="o", ms=6, color=color, capsize=3,
                          label=f"against {baseline}" if n == 0 else None)  # fmt: skip
            axes.annotate(f"{of['median']:.2f}", (high, place), (6, 0), va="center",
                          textcoords="offset points", fontsize="small")  # fmt: skip
            most = max(most, high)
    axes.axvline(1, color="gray", ls=":", lw=1)
    axes.set_xlim(0, 1.15 * most)
    spread = "95% interval" if sure else "slowest to fastest prompt"
    axes.set_title(f"times as fast: median, {spread}", loc="left", fontsize="medium")
    axes.legend(fontsize="small", loc="lower right", frameon=False)


def _draw_bars(
    axes: Axes, values: Sequence[float], errors: Sequence[float] | None, color: str
) -> None:
    """A bar for each drafter with its figure behind it, clear of its error."""
    axes.barh(range(len(values)), values, xerr=errors, height=0.55, color=color, alpha=0.8,
              error_kw={"capsize": 3, "lw": 1})  # fmt: skip
    for n, value in enumerate(values):
        end = value + (errors[n] if errors else 0.0)
        axes.annotate(f"{value:.2f}", (end, n), (5, 0), va="center", textcoords="offset points",
                      fontsize="small")  # fmt: skip
    most = max(v + (errors[n] if errors else 0.0) for n, v in enumerate(values))
    axes.set_xlim(0, 1.25 * most)


def _tau_error(report: Report) -> float:
    """The standard error of the mean of the prompts' τ; 0 for a single prompt."""
    each = [tau for tau in report.get("tau_by_prompt") or () if tau is not None]
    return stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0


def noise_notes(reports: Sequence[Report]) -> list[str]:
    """Which speedups are no more than noise."""
    judged = [
        (label, key, report[f"speedup_vs_{key}"]["within_noise"], report["batch_size"])
        for label, report in labelled(reports).items()
        for key in _CALLED
        if f"speedup_vs_{key}" in report
    ]
    said = []
    if few := sorted({size for *_, unsure, size in judged if unsure is None}):
        units = " or ".join("prompts" if size == 1 else f"batches of {size}" for size in few)
        said.append(f"Fewer than 6 {units}: too few to tell a speedup from noise.")
    same = [f"{label} and {_CALLED[key]}" for label, key, unsure, _ in judged if unsure]
    if same:
        said.append(
            "Within noise (the 95% interval of the median speedup contains 1): no difference is "
            f"shown between {_listed(same)}."
        )
    return said


def _listed(names: Sequence[str]) -> str:
    shown = "; ".join(dict.fromkeys(names[:4]))
    return shown if len(names) <= 4 else f"{shown}; and {len(names) - 4} more"
