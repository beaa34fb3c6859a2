"""Several measured runs on the same prompts and target: one table with a line for each."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from .console import column_table, grid, titled
from .document import Report, to_json
from .measured import known, print_remarks, rule_name, setting_rows, tree_name


def print_comparison(
    reports: Sequence[Report], out: TextIO, title: str, as_json: bool = False
) -> None:
    """Print the document, or a line for each report."""
    if as_json:
        print(to_json({"runs": reports}), file=out)
        return
    console = titled(out, title)
    console.print()
    figures = ("nodes", "τ", "ms/round", "× plain", "× generate", "same")
    table = column_table(("tree", "rule"), figures)
    for report in reports:
        table.add_row(*comparison_row(report))
    console.print(table)
    print_shared(reports, console)


def comparison_row(report: Report) -> list[str]:
    """tree, rule, nodes, τ, ms per round, both median speedups, whether all outputs agree."""
    speedups = [report.get(f"speedup_vs_{name}") for name in ("plain", "generate")]
    same = [report.get(f"identical_to_{name}") for name in ("plain", "generate")]
    return [
        tree_name(report),
        rule_name(report),
        str(report["nodes"]),
        *(f"{report[key]:.2f}" if known(report, key) else "–" for key in ("tau", "ms_per_round")),
        *(f"{of['median']:.2f}" if of else "–" for of in speedups),
        "NO" if False in same else "yes" if True in same else "–",
    ]


def print_shared(reports: Sequence[Report], console: Console) -> None:
    """Print the settings that compared runs share, and every remark once."""
    shared = {key: reports[0].get(key) for key in ("dtype", "prompts", "tokens", "threads")}
    console.print()
    console.print(grid(setting_rows(shared)))
    print_remarks(reports, console)
