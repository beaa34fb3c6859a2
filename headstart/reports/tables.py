"""What a measured run reports: one JSON document, or a table for people.

A report is the dict that the benchmark returns, with the names in `KEYS`. A value that was not
measured is None and has no line in the table.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Report = Mapping[str, Any]

KEYS = (
    "tau",
    "tau_by_prompt",
    "acceptance_by_depth",
    "identical_to_plain",
    "identical_to_generate",
    "speedup_vs_plain",
    "speedup_vs_generate",
    "plain_ms_per_token",
    "generate_ms_per_token",
    "bare_loop_ms_per_token",
    "ms_per_round",
    "loop_overhead_ms",
    "nodes",
    "tree",
    "tree_label",
    "rule",
    "dtype",
    "prompts",
    "tokens",
    "distinct_4grams",
    "stage_seconds",
    "threads",
    "artifact",
)

_REPETITIVE = 0.5  # share of distinct 4-grams under which the table warns about the text


def to_json(report: Report) -> str:
    """One JSON document; a number that is not finite becomes null, which every reader accepts.

    >>> to_json({"tau": 2.5, "ms_per_round": float("nan")})
    '{\\n  "tau": 2.5,\\n  "ms_per_round": null\\n}'
    """
    return json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False)


def plain_console(out: TextIO, width: int | None = None) -> Console:
    """A console on `out`: colours on a terminal, plain text anywhere else.

    Without markup: a tree or a path may hold square brackets.
    """
    from rich.console import Console

    return Console(file=out, markup=False, emoji=False, highlight=False, width=width)


def titled(out: TextIO, title: str, width: int | None = None) -> Console:
    """A `plain_console` with a title printed on it, which is never cut into lines."""
    console = plain_console(out, width)
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    return console


def print_table(report: Report, out: TextIO, title: str = "headstart") -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    console = titled(out, title)
    for rows in (_speed_rows(report), _output_rows(report), _setting_rows(report)):
        if rows:
            console.print()
            console.print(grid(rows))
    for sentence in remarks(report):
        console.print()
        console.print(sentence, style="yellow")


def print_comparison(reports: Sequence[Report], out: TextIO, title: str) -> None:
    """Print a line for each report, of runs that share prompts and target."""
    from rich.table import Table

    console = titled(out, title)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("tree", overflow="fold")
    table.add_column("rule")
    for name in ("nodes", "τ", "ms/round", "× plain", "× generate", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(*comparison_row(report))
    console.print(table)
    print_shared(reports, console)


def print_shared(reports: Sequence[Report], console: Console) -> None:
    """Print the settings that compared runs share, and every remark once."""
    shared = {key: reports[0].get(key) for key in ("dtype", "prompts", "tokens", "threads")}
    console.print()
    console.print(grid(_setting_rows(shared)))
    for sentence in dict.fromkeys(said for report in reports for said in remarks(report)):
        console.print()
        console.print(sentence, style="yellow")


def print_next_steps(report: Report, out: TextIO) -> None:
    """Print the artifact's folder and commands to try, one a line and never wrapped."""
    commands = next_commands(report)
    if not commands:
        return
    print(f"\nThe drafter is in {report['artifact']}\n\nTo try next:", file=out)
    for command in commands:
        print(f"  {command}", file=out)


def next_commands(report: Report) -> list[str]:
    """Shell lines that use the artifact; empty where the run wrote none.

    >>> next_commands({"artifact": "runs/quickstart/heads"})[0]
    "headstart generate --drafter runs/quickstart/heads --prompt 'import os'"
    """
    if not report.get("artifact"):
        return []
    artifact = Path(report["artifact"])
    drafter = f"--drafter {shlex.quote(str(artifact))}"
    commands = [f"headstart generate {drafter} --prompt 'import os'"]
    commands.append(f"headstart generate {drafter} --prompt 'import os' --temperature 0.8 --seed 1")
    held_out = Path(report.get("held_out") or artifact.parent / "corpus" / "held_out.jsonl")
    if held_out.is_file():
        prompts = f"--prompts {shlex.quote(str(held_out))}"
        commands.append(f"headstart bench {drafter} {prompts} --tree chain:4")
    return commands


def remarks(report: Report) -> list[str]:
    """Sentences that the numbers must not be read without."""
    said = []
    if _known(report, "distinct_4grams") and report["distinct_4grams"] < _REPETITIVE:
        said.append(
            f"Only {report['distinct_4grams']:.0%} of the 4-grams are distinct: the target repeats "
            "itself, and repeating text flatters every drafter."
        )
    if False in (report.get("identical_to_plain"), report.get("identical_to_generate")):
        said.append("The outputs differ, so the speedup does not count until it is known why.")
    return said


def _speed_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    if _known(report, "tau"):
        rows.append(("tokens per round (τ)", f"{report['tau']:.2f}{_tau_range(report)}"))
    if report.get("acceptance_by_depth"):
        shares = "  ".join(f"{_percent(share)}" for share in report["acceptance_by_depth"])
        rows.append(("acceptance at depth 1, 2, …", shares))
    if _known(report, "ms_per_round"):
        loop = report.get("loop_overhead_ms")
        cost = f", of which the loop costs {loop:.2f} ms" if loop is not None else ""
        rows.append(("one round", f"{report['ms_per_round']:.2f} ms{cost}"))
    for name in ("plain", "generate"):
        speedup = report.get(f"speedup_vs_{name}")
        if speedup:
            rows.append((f"speedup against {name}", _speedup(speedup)))
    for name, label in (
        ("plain", "plain decoding"),
        ("generate", "generate"),
        ("bare_loop", "a bare loop"),
    ):
        if _known(report, f"{name}_ms_per_token"):
            rows.append((label, f"{report[f'{name}_ms_per_token']:.2f} ms a token"))
    return rows


def comparison_row(report: Report) -> list[str]:
    """tree, rule, nodes, τ, ms per round, both median speedups, whether all outputs agree."""
    speedups = [report.get(f"speedup_vs_{name}") for name in ("plain", "generate")]
    same = [report.get(f"identical_to_{name}") for name in ("plain", "generate")]
    return [
        _tree_name(report),
        _rule(report),
        str(report["nodes"]),
        f"{report['tau']:.2f}" if _known(report, "tau") else "–",
        f"{report['ms_per_round']:.2f}" if _known(report, "ms_per_round") else "–",
        *(f"{of['median']:.2f}" if of else "–" for of in speedups),
        "NO" if False in same else "yes" if True in same else "–",
    ]


def _rule(report: Report) -> str:
    """The rule's name, and whether it is approximate."""
    return f"{report['rule']}{'' if report.get('exact', True) else ' (approximate)'}"


def _output_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    for name in ("plain", "generate"):
        same = report.get(f"identical_to_{name}")
        if same is not None:
            rows.append((f"identical to {name}", "yes" if same else "NO"))
    if _known(report, "distinct_4grams"):
        rows.append(("distinct 4-grams", f"{report['distinct_4grams']:.0%}"))
    return rows


def _setting_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    if report.get("tree") is not None:
        nodes = f", {report['nodes']} nodes" if _known(report, "nodes") else ""
        rows.append(("tree", f"{_tree_name(report)}{nodes}"))
    ways = [_rule(report)] if report.get("rule") else []
    ways += [str(report["dtype"])] if report.get("dtype") else []
    if ways:
        rows.append(("rule, dtype", ", ".join(ways)))
    if _known(report, "prompts"):
        tokens = f", {report['tokens']:,} tokens" if _known(report, "tokens") else ""
        rows.append(("prompts", f"{report['prompts']}{tokens}"))
    if _known(report, "threads"):
        rows.append(("threads", str(report["threads"])))
    stages = report.get("stage_seconds")
    if stages:
        each = "  ".join(f"{name} {seconds:.0f}" for name, seconds in stages.items())
        rows.append(("seconds a stage", f"{each}  (sum {sum(stages.values()):.0f})"))
    return rows


def grid(rows: list[tuple[str, str]]) -> Table:
    """Two columns: the label as wide as the widest of all groups, the value wraps.

    A value that starts with NO stands out.
    """
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(width=31, style="cyan")
    table.add_column()
    for label, value in rows:
        table.add_row(f"  {label}", value, style="bold red" if value.startswith("NO") else None)
    return table


def _tau_range(report: Report) -> str:
    each = report.get("tau_by_prompt")
    return f"  (prompts {min(each):.2f}–{max(each):.2f})" if each else ""


def _tree_name(report: Report) -> str:
    """The tree's short name; reports written before it was noted have the tree alone."""
    name, tree = report.get("tree_label"), report["tree"]
    return name or (tree if isinstance(tree, str) else f"{len(tree)} rank paths")


def _speedup(of: Mapping[str, float]) -> str:
    return f"{of['median']:.2f}×  ({of['min']:.2f}–{of['max']:.2f})"


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _known(report: Report, key: str) -> bool:
    value = report.get(key)
    return value is not None and math.isfinite(value)


def _finite(value: Any) -> Any:
    """The same document with None for every nan and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
