"""One measured run for people: its table, what to keep in mind, and commands to try next.

A value that is None was not measured and has no line.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from .console import grid, titled
from .document import Report, to_json

_REPETITIVE = 0.5  # share of distinct 4-grams under which the table warns about the text


def print_report(report: Report, out: TextIO, title: str, as_json: bool = False) -> None:
    """Print the document, or the table and the next steps."""
    if as_json:
        print(to_json(report), file=out)
        return
    print_table(report, out, title)
    print_next_steps(report, out)


def print_table(report: Report, out: TextIO, title: str = "headstart") -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    console = titled(out, title)
    for rows in (_speed_rows(report), _output_rows(report), setting_rows(report)):
        if rows:
            console.print()
            console.print(grid(rows))
    print_remarks([report], console)


def print_remarks(reports: Sequence[Report], console: Console) -> None:
    """Print the remarks on all reports, each once."""
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
    if known(report, "distinct_4grams") and report["distinct_4grams"] < _REPETITIVE:
        said.append(
            f"Only {report['distinct_4grams']:.0%} of the 4-grams are distinct: the target repeats "
            "itself, and repeating text flatters every drafter."
        )
    if False in (report.get("identical_to_plain"), report.get("identical_to_generate")):
        said.append("The outputs differ, so the speedup does not count until it is known why.")
    return said


def _speed_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    if known(report, "tau"):
        each = report.get("tau_by_prompt")
        spread = f"  (prompts {min(each):.2f}–{max(each):.2f})" if each else ""
        rows.append(("tokens per round (τ)", f"{report['tau']:.2f}{spread}"))
    if shares := report.get("acceptance_by_depth"):
        rows.append(("acceptance at depth 1, 2, …", percentages(shares)))
    if known(report, "ms_per_round"):
        loop = report.get("loop_overhead_ms")
        cost = f", of which the loop costs {loop:.2f} ms" if loop is not None else ""
        rows.append(("one round", f"{report['ms_per_round']:.2f} ms{cost}"))
    for name in ("plain", "generate"):
        if of := report.get(f"speedup_vs_{name}"):
            speedup = f"{of['median']:.2f}×  ({of['min']:.2f}–{of['max']:.2f})"
            rows.append((f"speedup against {name}", speedup))
    for name, label in (
        ("plain", "plain decoding"),
        ("generate", "generate"),
        ("bare_loop", "a bare loop"),
    ):
        if known(report, f"{name}_ms_per_token"):
            rows.append((label, f"{report[f'{name}_ms_per_token']:.2f} ms a token"))
    return rows


def _output_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    for name in ("plain", "generate"):
        same = report.get(f"identical_to_{name}")
        if same is not None:
            rows.append((f"identical to {name}", "yes" if same else "NO"))
    if known(report, "distinct_4grams"):
        rows.append(("distinct 4-grams", f"{report['distinct_4grams']:.0%}"))
    return rows


def setting_rows(report: Report) -> list[tuple[str, str]]:
    """What the run was measured with."""
    rows = []
    if report.get("tree") is not None:
        nodes = f", {report['nodes']} nodes" if known(report, "nodes") else ""
        rows.append(("tree", f"{tree_name(report)}{nodes}"))
    ways = [rule_name(report)] if report.get("rule") else []
    ways += [str(report["dtype"])] if report.get("dtype") else []
    if ways:
        rows.append(("rule, dtype", ", ".join(ways)))
    if known(report, "prompts"):
        tokens = f", {report['tokens']:,} tokens" if known(report, "tokens") else ""
        rows.append(("prompts", f"{report['prompts']}{tokens}"))
    if known(report, "threads"):
        rows.append(("threads", str(report["threads"])))
    if stages := report.get("stage_seconds"):
        each = "  ".join(f"{name} {seconds:.0f}" for name, seconds in stages.items())
        rows.append(("seconds a stage", f"{each}  (sum {sum(stages.values()):.0f})"))
    return rows


def rule_name(report: Report) -> str:
    """The rule's name, and whether it is approximate."""
    return f"{report['rule']}{'' if report.get('exact', True) else ' (approximate)'}"


def tree_name(report: Report) -> str:
    """The tree's short name; reports written before it was noted have the tree alone."""
    name, tree = report.get("tree_label"), report["tree"]
    return name or (tree if isinstance(tree, str) else f"{len(tree)} rank paths")


def percentages(shares: Sequence[float | None]) -> str:
    """Shares as percentages, a dash for one that is not known.

    >>> percentages([0.75, None])
    '75%  –'
    """
    each = [f"{s:.0%}" if s is not None and math.isfinite(s) else "–" for s in shares]
    return "  ".join(each)


def known(report: Mapping[str, Any], key: str) -> bool:
    """Whether a number was measured and is finite."""
    value = report.get(key)
    return value is not None and math.isfinite(value)
