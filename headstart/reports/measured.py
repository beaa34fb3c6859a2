"""One measured run for people: its table, what to keep in mind, and commands to try next.

A value that is None was not measured and has no line.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from headstart.heads.core import counted
from headstart.infer.rules.registry import RULES

from .tables import Report, grid, print_apart, titled, to_json

_REPETITIVE = 0.5  # share of distinct 4-grams under which the table warns about the text


def print_report(report: Report, out: TextIO, title: str, as_json: bool = False) -> None:
    """Print the document, or the table and the next steps."""
    if as_json:
        print(to_json(report), file=out)
    else:
        print_table(report, out, title)
        print_next_steps(report, out)


def print_table(report: Report, out: TextIO, title: str) -> None:
    """Print the table to `out`: colours on a terminal, plain text anywhere else."""
    console = titled(out, title)
    print_apart(console, *doubts(report), style="bold yellow")
    print_apart(console, *gained(report), style="bold")
    blocks = _speed_rows, _output_rows, _sampled_rows, setting_rows
    for rows in (block(report) for block in blocks):
        if any(value for _, value in rows):
            print_apart(console, grid(rows))
    print_remarks([report], console, told=doubts(report))


def print_remarks(reports: Sequence[Report], console: Console, told: Sequence[str] = ()) -> None:
    """Print the remarks on all reports, each once; of texts that repeat themselves the worst.

    Args:
        told: those that were printed before.
    """
    known = [report for report in reports if report.get("distinct_4grams") is not None]
    least = {"distinct_4grams": min((of["distinct_4grams"] for of in known), default=None)}
    said = dict.fromkeys(
        sentence for report in reports for sentence in remarks({**report, **least})
    )
    print_apart(console, *(sentence for sentence in said if sentence not in told), style="yellow")


def print_next_steps(report: Report, out: TextIO) -> None:
    """Print the artifact's folder and commands to try, one a line and never wrapped."""
    if commands := next_commands(report):
        lines = (f"\nThe drafter is in {report['artifact']}\n\nTo try next:", *commands)
        print(*lines, sep="\n  ", file=out)


def next_commands(report: Report) -> list[str]:
    """Shell lines that use the artifact; empty where the run wrote none.

    >>> next_commands({"artifact": "runs/quickstart/heads"})[0]
    "headstart generate --drafter runs/quickstart/heads --prompt 'def read(self' --show"
    """
    if not report.get("artifact"):
        return []
    artifact = Path(report["artifact"])
    drafter = f"--drafter {shlex.quote(str(artifact))}"
    generate = f"headstart generate {drafter} --prompt 'def read(self' --show"
    temperature = (report.get("sampled") or {}).get("temperature", 0.3)
    commands = [generate, f"{generate} --temperature {temperature:g} --seed 1"]
    held_out = Path(report.get("held_out") or artifact.parent / "corpus" / "held_out.jsonl")
    if held_out.is_file():
        prompts = f"--prompts {shlex.quote(str(held_out))}"
        commands.append(f"headstart bench {drafter} {prompts} --tree chain:4")
    return commands


def gained(report: Report) -> list[str]:
    """What the drafter was worth, in a sentence; none where that was not measured.

    >>> gained({"speedup_vs_plain": {"median": 2.9}, "identical_to_plain": True})
    ['The same text, 2.9 times as fast as plain decoding.']
    """
    plain, generate = "plain decoding", "generate of transformers"
    if (faster := faster_forwards(report)) is not None:
        plain, generate = f"{plain} with the same {faster}", f"{generate} without them"
    times = [
        _times_as_fast(report[f"speedup_vs_{name}"], said)
        for name, said in (("plain", plain), ("generate", generate))
        if report.get(f"speedup_vs_{name}")
    ]
    if not times or False in (
        report.get("identical_to_plain"),
        report.get("identical_to_generate"),
    ):
        return []
    what = "The same text" if report.get("identical_to_plain") else "Text of the same distribution"
    if report.get("sampled"):
        what = f"Greedy: {what[0].lower()}{what[1:]}"
    return [f"{what}, {' and '.join(times)}.", *gained_sampled(report)]


def _times_as_fast(speedup: Report, other: str) -> str:
    noise = " (within noise)" if speedup.get("within_noise") else ""
    return f"{speedup['median']:.1f} times as fast as {other}{noise}"


def faster_forwards(report: Report) -> str | None:
    """By what forwards ran faster than those of transformers, in all ways but its own."""
    forwards = report.get("forwards")
    return None if forwards == "torch" else forwards


def gained_sampled(report: Report) -> list[str]:
    """What the drafter was worth where the same prompts were sampled, in a sentence."""
    of = report.get("sampled")
    if not of or of["identical_to_plain"] is False:
        return []
    same = "the same text" if of["identical_to_plain"] else "text of the same distribution"
    less = "less" if of["distinct_4grams"] > report["distinct_4grams"] else "no less"
    return [
        f"Sampled at temperature {of['temperature']:g}, where the text repeats itself {less}: "
        f"{same}, {_times_as_fast(of['speedup_vs_plain'], 'plain decoding')}."
    ]


def doubts(report: Report) -> list[str]:
    """Why the figures mean little, if they do: sentences that stand before all others."""
    said = []
    if False in (report.get("identical_to_plain"), report.get("identical_to_generate")):
        said.append("The outputs differ, so the speedup does not count until it is known why.")
    loss, expected = report.get("target_loss"), report.get("expected_loss")
    if loss is not None and expected is not None and loss > expected:
        said.append(
            f"These figures mean little, because the target hardly learnt: its training loss is "
            f"{loss:.2f}, expected at most {expected:.2f}. The machine is slow or was busy: run it "
            "again with --fresh when nothing else runs."
        )
    return said


def remarks(report: Report) -> list[str]:
    """Sentences that the numbers must not be read without."""
    said, distinct = doubts(report), report.get("distinct_4grams")
    if (faster := faster_forwards(report)) is not None and report.get("speedup_vs_generate"):
        said.append(
            f"Plain decoding uses the same {faster} as drafting, generate does not: the speedup "
            "against plain decoding is the drafter's alone, the speedup against generate is that "
            f"of drafter and {faster} together."
        )
    if distinct is not None and distinct < _REPETITIVE:
        said.append(
            f"Only {distinct:.0%} of the 4-grams are distinct: the target repeats itself, and "
            "repetitive text makes every drafter look good."
        )
    if (parameters := report.get("target_parameters")) is not None:
        said.append(
            f"The target is tiny: {parameters / 1e6:.1f} million parameters, trained for "
            f"{report['target_seconds']:.0f} s. Its text looks like code without meaning, and "
            "these figures do not show what a larger model would gain."
        )
    sampled = report.get("sampled")
    if sampled and (speedup := sampled["speedup_vs_plain"])["median"] < 1:
        at = f"temperature {sampled['temperature']:g}"
        slower = "is not shown to be faster" if speedup.get("within_noise") else "is slower"
        said.append(
            f"Sampled at {at}, drafting {slower} here: --tree adaptive drafts no deeper than pays, "
            f"and headstart plan --{at} finds the fastest tree, or none."
        )
    return said


def _speed_rows(report: Report) -> list[tuple[str, str]]:
    each = [tau for tau in report.get("tau_by_prompt") or () if tau is not None]
    spread = f"  (prompts {min(each):.2f}–{max(each):.2f})" if each else ""
    loop = shown(report, "loop_overhead_ms", ", of which the loop costs {:.2f} ms")
    if (report.get("loop_overhead_ms") or 0) < 0:
        loop = "; the loop's cost is lost in noise"
    rows = [
        ("tokens per round (τ)", shown(report, "tau", "{:.2f}" + spread)),
        ("acceptance at depth 1, 2, …", percentages(report.get("acceptance_by_depth") or ())),
        ("one round", shown(report, "ms_per_round", "{:.2f} ms" + loop)),
    ]
    for name in ("plain", "generate", "assistant", "lookup"):
        if of := report.get(f"speedup_vs_{name}"):
            rows.append((f"speedup against {name}", f"{of['median']:.2f}×  ({_spread(of)})"))
    labels = {"plain": "plain decoding", "generate": "generate"}
    for name, label in labels.items():
        rows.append((label, shown(report, f"{name}_ms_per_token", "{:.2f} ms a token")))
    if faster_forwards(report) is not None and report.get("generate_ms_per_token"):
        times = report["generate_ms_per_token"] / report["plain_ms_per_token"]
        rows.append(("plain against generate", f"{times:.2f}×, without a drafter"))
    return rows


def _spread(speedup: Report) -> str:
    """The interval of a median, or the extreme prompts where there are too few for one.

    >>> _spread({"low": 1.2, "high": 1.6, "min": 1.0, "max": 2.0})
    '95% interval 1.20–1.60'
    """
    if speedup.get("low") is None:
        return f"prompts {speedup['min']:.2f}–{speedup['max']:.2f}"
    return f"95% interval {speedup['low']:.2f}–{speedup['high']:.2f}"


def _output_rows(report: Report) -> list[tuple[str, str]]:
    said = {True: "yes", False: "NO", None: ""}
    return [
        ("identical to plain", said[report.get("identical_to_plain")]),
        ("identical to generate", said[report.get("identical_to_generate")]),
        ("distinct 4-grams", shown(report, "distinct_4grams", "{:.0%}")),
    ]


def _sampled_rows(report: Report) -> list[tuple[str, str]]:
    """The same of text that was sampled, which repeats itself less."""
    of = report.get("sampled")
    if not of:
        return []
    speed = of["speedup_vs_plain"]
    same = {True: "identical to plain", False: "NOT as plain", None: "of the same distribution"}
    return [
        (
            f"sampled at temperature {of['temperature']:g}",
            f"τ {of['tau']:.2f}, {speed['median']:.2f}× plain  ({_spread(speed)})",
        ),
        ("its text", same[of["identical_to_plain"]]),
        ("its distinct 4-grams", f"{of['distinct_4grams']:.0%}"),
    ]


def setting_rows(report: Report) -> list[tuple[str, str]]:
    """What the run was measured with."""
    tree = tree_name(report) if report.get("tree") else ""
    if tree and report.get("nodes") is not None:
        tree += f", {counted(report['nodes'], 'node')}"
    rule = rule_name(report) if report.get("rule") else None
    stages = report.get("stage_seconds") or {}
    seconds = "  ".join(f"{name} {seconds:.0f}" for name, seconds in stages.items())
    return [
        ("tree", tree),
        ("rule, dtype" if rule else "dtype", ", ".join(filter(None, (rule, report.get("dtype"))))),
        ("forwards", f"with {faster}" if (faster := faster_forwards(report)) else ""),
        ("prompts", shown(report, "prompts", "{}" + shown(report, "tokens", ", {:,} tokens"))),
        ("threads", shown(report, "threads", "{}")),
        ("processes", f"{count}" if (count := report.get("processes") or 1) > 1 else ""),
        ("seconds a stage", f"{seconds}  (sum {sum(stages.values()):.0f})" if stages else ""),
    ]


def rule_name(report: Report) -> str:
    """The rule's name, with the children where it takes several kinds, and if it is approximate."""
    name, expansion = report["rule"], report.get("expansion")
    said = [expansion] if expansion and RULES[name].has_choice else []
    said += [] if report.get("exact", True) else ["approximate"]
    return f"{name} ({', '.join(said)})" if said else name


def tree_name(report: Report) -> str:
    """The tree's short name; reports written before it was noted have the tree alone."""
    name, tree = report.get("tree_label"), report["tree"]
    return name or (tree if isinstance(tree, str) else f"{len(tree)} rank paths")


def labelled(reports: Sequence[Report]) -> dict[str, Report]:
    """Reports by the way's name, with temperature and batch size where they differ."""
    found = {}
    for report in reports:
        name = report.get("way") or tree_name(report)
        for key, form in (("temperature", "T {:g}"), ("batch_size", "batch {}")):
            if len({each.get(key) for each in reports}) > 1:
                name += ", " + form.format(report[key])
        found[name] = report
    return found


def percentages(shares: Sequence[float | None]) -> str:
    """Shares as percentages, a dash for one that is not known.

    >>> percentages([0.75, None])
    '75%  –'
    """
    each = [f"{s:.0%}" if s is not None and math.isfinite(s) else "–" for s in shares]
    return "  ".join(each)


def shown(report: Report, key: str, form: str) -> str:
    """A number in a form such as `{:.2f} ms`; empty where it was not measured."""
    value = report.get(key)
    return form.format(value) if value is not None and math.isfinite(value) else ""
