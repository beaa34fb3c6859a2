"""The report.html of `bench`, `quickstart` and `plan`; that of a training is in `train/figures`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.heads.core import counted
from headstart.train.figures.report import drawings
from headstart.train.figures.report.page import Page, Picture, Sample, Table, write_page
from headstart.train.figures.report.parts import NOTES, environment, sample
from headstart.train.figures.report.training import training_pictures, tree_picture

from .measured import (
    doubts,
    gained_sampled,
    labelled,
    percentages,
    remarks,
    rule_name,
    shown,
    tree_name,
)
from .plans import draw_candidates, held_for, requests_of, said_of_plan
from .tables import Report

if TYPE_CHECKING:
    from headstart.heads.artifacts.plan import Plan
    from headstart.measuring import Measured

PAGE = "report.html"
_CHOSEN = "Shown are the texts that repeat themselves least."
_OF_BENCH = (
    "speedup", "tau_by_way", "against", "acceptance", "round", "tree", "speedup_by_category",
    "tau_by_category", "tau_by_prompt", "speedup_by_prompt",
)  # fmt: skip
_OF_PLAN = ("speedup", "verify", "first_choice", "tree")
_WAYS = 6  # in a picture of several lines
_NAMES = {"plain": "plain decoding", "generate": "generate", "assistant": "assistant_model",
          "lookup": "prompt lookup"}  # fmt: skip


def write_bench_page(measured: Measured, folder: Path) -> Path:
    """The page of a bench, with its pictures beside it."""
    reports = labelled(measured.reports)
    best = fastest(reports)
    report = reports[best]
    against = report["speedup_vs_plain"]
    many = f"The fastest of {len(reports)} configurations, {best}," if len(reports) > 1 else best
    if report["tree"] == "plain" and report["drafter"] != "plain":
        many += " drafts nothing here, and"
    page = Page(
        title=f"headstart bench: {Path(measured.target).name}",
        said=f"{many} decodes {against['median']:.2f} times as fast as plain decoding"
        f"{_interval(against)}, with {report['tau']:.2f} tokens per round, on "
        f"{counted(report['prompts'], 'prompt')} of {Path(measured.matrix.prompts).name}.",
        facts=_facts(report),
        pictures=bench_pictures(reports),
        tables=[_table(reports), *_categories(report)],
        samples=_samples(report, measured.tokenizer),
        chosen=_CHOSEN,
        environment=[
            *environment(report["device"], report["dtype"]),
            ("measured", f"{measured.matrix.new_tokens} new tokens per answer, "
             f"{counted(measured.matrix.repeats, 'repeat')}, medians; all take turns, after a "
             "warm-up"),
        ],
        notes=[*measured.notes, *remarks(report), *NOTES],
    )  # fmt: skip
    return write_page(page, folder / PAGE, _OF_BENCH)


def write_quickstart_page(report: Report, name: str, folder: Path) -> Path:
    """The page of one run of a recipe: its training and its benchmark."""
    from transformers import AutoTokenizer

    from headstart.heads.artifacts.manifest import read_manifest
    from headstart.heads.artifacts.source import DrafterSource
    from headstart.heads.core import load_pretrained
    from headstart.heads.families import with_article

    artifact = Path(report["artifact"])
    manifest = read_manifest(artifact)
    tokenizer = load_pretrained(AutoTokenizer, DrafterSource(str(artifact)).own_target)
    against = report["speedup_vs_plain"]
    known = manifest.metrics.get("tree_shares")
    report = {**report} | ({"tree_shares": known} if known else {})
    training = training_pictures(artifact / "metrics.jsonl", manifest.metrics)
    training = [
        each for each in training if each.name not in ("acceptance", "tree", "tau_by_prompt")
    ]
    stages = report.get("stage_seconds") or {}
    page = Page(
        title=f"headstart {name}: {with_article(manifest.family)} drafter",
        said=" ".join([
            *doubts(report),
            f"On held-out prompts it decodes {against['median']:.2f} times as fast as plain "
            f"decoding{_interval(against)}, with {report['tau']:.2f} tokens per round.",
            *gained_sampled(report),
        ]),
        facts=_facts(report),
        pictures=[*bench_pictures({manifest.family: report}), *training],
        tables=_categories(report),
        samples=_both(report, tokenizer),
        chosen=_CHOSEN,
        environment=[
            *environment(report["device"], report["dtype"]),
            ("seconds a stage", ", ".join(f"{stage} {s:.0f}" for stage, s in stages.items())),
        ],
        notes=[*remarks(report), *NOTES],
    )  # fmt: skip
    return write_page(page, folder / PAGE)


def write_plan_page(plan: Plan, folder: Path) -> Path:
    """The page of a plan, with its pictures beside it."""
    best = plan.candidates[0]
    paths = plan.tree or best.get("tree") or []
    shares = [
        math.prod(plan.acceptance[d][rank] if rank < len(plan.acceptance[d]) else 0.0
                  for d, rank in enumerate(path))
        for path in paths if len(path) <= len(plan.acceptance)
    ]  # fmt: skip
    first = [row[0] for row in plan.acceptance]
    said = "Expected from recorded ranks and timed forwards; crosses were measured by decoding."
    pictures = [
        Picture("speedup", "Speedup by tree size", said, partial(draw_candidates, plan=plan)),
        Picture(
            "verify", "What a forward of the target costs",
            "Median milliseconds, by the number of nodes verified at once.",
            partial(_draw_verify, costs=plan.costs),
        ),
        Picture(
            "first_choice", "The drafter's first choice, by depth",
            "How often it is the target's token, if the tokens before it were right.",
            partial(drawings.acceptance_by_depth, shares={"": first}),
        ),
    ]  # fmt: skip
    if paths and len(shares) == len(paths):
        pictures.append(tree_picture(paths, shares))
    columns = ("nodes", "depth", "tau", "round_ms", "speedup", "measured_speedup")
    rows = [
        [each["name"], *(_number(each[column]) for column in columns)]
        for each in plan.candidates[:20]
    ]
    header = ["tree", "nodes", "depth", "τ", "ms per round", "× plain", "measured"]
    page = Page(
        title="headstart plan",
        said=said_of_plan(plan),
        facts=[
            ("chosen", plan.policy),
            ("× plain decoding", f"{plan.speedup:.2f}"),
            ("tokens per round, τ", f"{plan.tau:.2f}"),
            ("trees considered", str(len(plan.candidates))),
            ("prompts", str(plan.prompts)),
            ("decoded", requests_of(plan.batch_size, plan.temperature)),
        ],
        pictures=pictures,
        tables=[Table("The best trees", header, rows)],
        environment=environment(plan.device, plan.dtype),
        notes=[
            held_for(plan),
            "The probability of a node is the product of its ranks' shares along the path, as if "
            "the depths were independent.",
            *NOTES[:2],
        ],
    )  # fmt: skip
    return write_page(page, folder / PAGE, _OF_PLAN)


def bench_pictures(reports: Mapping[str, Report]) -> list[Picture]:
    """The pictures of measured ways; the details are of the fastest."""
    best = reports[fastest(reports)]
    few = dict(list(reports.items())[:_WAYS])
    found = []
    ratio = "A point is the median over prompts, the thick line its 95% interval, the thin one the "
    ratio += "slowest to the fastest prompt; a hollow point means within noise of 1."
    draw = partial(drawings.ratios, label="times as fast")
    if len(reports) > 1:
        rows = {name: of["speedup_vs_plain"] for name, of in reports.items()}
        found.append(Picture("speedup", "Speedup against plain decoding, by configuration", ratio,
                             partial(draw, found=rows), rows=2 * len(rows)))  # fmt: skip
        taus = {name: of["tau"] for name, of in reports.items()}
        bars = partial(drawings.values, found=taus, label="tokens per round", least=0)
        said = "Plain decoding writes one token per round."
        found.append(Picture("tau_by_way", "τ by configuration", said, bars, rows=len(taus)))
    against = {
        f"against {_NAMES.get(key, key)}": best[f"speedup_vs_{key}"]
        for key in _NAMES if best.get(f"speedup_vs_{key}")
    }  # fmt: skip
    title = "Speedup against each baseline"
    if len(reports) > 1:
        title += ", the fastest configuration"
    found.append(Picture("against", title, ratio, partial(draw, found=against),
                         rows=2 * len(against)))  # fmt: skip
    shares = {name: of["acceptance_by_depth"] for name, of in few.items()}
    if any(any(each) for each in shares.values()):
        said = "Share of the drafted tokens whose parent was accepted, by the depth of the token."
        bars = partial(drawings.acceptance_by_depth, shares=shares)
        found.append(Picture("acceptance", "Acceptance by depth", said, bars))
    parts = {name: of["round_parts_ms"] for name, of in few.items() if of.get("round_parts_ms")}
    if parts:
        said = "The forwards are timed alone; the loop is the rest of the round."
        bars = partial(drawings.round_parts, parts=parts)
        found.append(Picture("round", "Where a round's time goes", said, bars, rows=2 * len(parts)))
    if best.get("tree_paths"):
        found.append(tree_picture(best["tree_paths"], best.get("tree_shares")))
    if categories := best.get("by_category"):
        rows = {
            name: of["speedup_vs_plain"]
            for name, of in categories.items()
            if "speedup_vs_plain" in of
        }
        found.append(Picture("speedup_by_category", "Speedup against plain decoding, by category",
                             ratio, partial(draw, found=rows), rows=2 * len(rows)))  # fmt: skip
        taus = {name: of["tau"] for name, of in categories.items() if of["tau"]}
        bars = partial(drawings.values, found=taus, label="tokens per round")
        said = "All rounds of a category together."
        if len(reports) > 1:
            said = "Of the fastest configuration. " + said
        found.append(Picture("tau_by_category", "τ by category", said, bars, rows=len(taus)))
    taus_of = {name: [t for t in of["tau_by_prompt"] if t is not None] for name, of in few.items()}
    if max(map(len, taus_of.values())) > 2:
        lines = partial(drawings.by_prompt, each=taus_of, label="tokens per round, τ")
        said = "A point is a prompt or a whole chat: how much τ varies around the mean."
        found.append(Picture("tau_by_prompt", "τ by prompt", said, lines))
    speeds = {
        name: [
            one["speedup_vs_plain"]
            for one in of.get("by_prompt", ())
            if "speedup_vs_plain" in one
        ]
        for name, of in few.items()
    }  # fmt: skip
    if max(map(len, speeds.values())) > 2:
        lines = partial(drawings.by_prompt, each=speeds, label="× plain decoding")
        said = "A point is a prompt. It takes little time, so points vary more than medians."
        found.append(Picture("speedup_by_prompt", "Speedup by prompt", said, lines))
    return found


def fastest(reports: Mapping[str, Report]) -> str:
    """The name of the report with the highest median speedup against plain decoding."""
    return max(reports, key=lambda name: reports[name]["speedup_vs_plain"]["median"])


def _facts(report: Report) -> list[tuple[str, str]]:
    same = (report.get("identical_to_plain"), report.get("identical_to_generate"))
    facts = [
        (f"× {_NAMES.get(key, key)}", f"{report[f'speedup_vs_{key}']['median']:.2f}")
        for key in _NAMES if report.get(f"speedup_vs_{key}")
    ]  # fmt: skip
    return [
        *facts,
        ("tokens per round, τ", f"{report['tau']:.2f}"),
        ("distinct 4-grams", shown(report, "distinct_4grams", "{:.0%}") or "–"),
        ("identical text", "NO" if False in same else "yes" if True in same else "not compared"),
        (f"prompts, {report['tokens']:,} tokens", f"{report['prompts']}"),
    ]


def _table(reports: Mapping[str, Report]) -> Table:
    others = [key for key in _NAMES if any(f"speedup_vs_{key}" in of for of in reports.values())]
    header = ["configuration", "tree", "rule", "nodes", "τ", "ms per round",
              *(f"× {key}" for key in others), "distinct 4-grams",
              "acceptance by depth"]  # fmt: skip
    rows = [
        [
            name, tree_name(of), rule_name(of), str(of["nodes"]), f"{of['tau']:.2f}",
            f"{of['ms_per_round']:.2f}", *(_speed(of.get(f"speedup_vs_{key}")) for key in others),
            shown(of, "distinct_4grams", "{:.0%}") or "–", percentages(of["acceptance_by_depth"]),
        ]
        for name, of in reports.items()
    ]  # fmt: skip
    return Table("All configurations", header, rows)


def _categories(report: Report) -> list[Table]:
    header = ["category", "prompts", "tokens", "τ", "× plain", "× generate", "distinct 4-grams"]
    rows = [
        [
            name, str(of["prompts"]), f"{of['tokens']:,}", _number(of["tau"]),
            _speed(of.get("speedup_vs_plain")), _speed(of.get("speedup_vs_generate")),
            shown(of, "distinct_4grams", "{:.0%}") or "–",
        ]
        for name, of in report.get("by_category", {}).items()
    ]  # fmt: skip
    return [Table("By category", header, rows)] if rows else []


def _samples(report: Report, tokenizer: Any, how: str = "") -> list[Sample]:
    return [
        sample(
            ", ".join(filter(None, (each["category"], f"prompt {each['id']}", how))),
            tokenizer, each["ids"], each["rounds"],
            each.get("prompt", ()),
        )
        for each in report.get("samples", ())
    ]  # fmt: skip


def _both(report: Report, tokenizer: Any) -> list[Sample]:
    """Greedy texts and, where there are some, sampled ones."""
    found, sampled = _samples(report, tokenizer), report.get("sampled")
    if not sampled:
        return found
    how = f"sampled at temperature {sampled['temperature']:g}"
    return [*found[:2], *_samples(sampled, tokenizer, how)[:2]]


def _draw_verify(axes: Any, costs: Mapping[str, Any]) -> None:
    sizes = sorted((int(size), ms) for size, ms in costs["verify"].items())
    axes.plot(*zip(*sizes, strict=True), "o-", ms=4, color=drawings.COLORS[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks([n for n, _ in sizes if n.bit_count() == 1])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(ms for _, ms in sizes))
    axes.set(xlabel="nodes, including the root", ylabel="milliseconds")


def _speed(of: Mapping[str, Any] | None) -> str:
    return f"{'~' if of.get('within_noise') else ''}{of['median']:.2f}" if of else "–"


def _interval(of: Mapping[str, Any]) -> str:
    if of.get("low") is None:
        return ""
    noise = ", which is within noise" if of.get("within_noise") else ""
    return f" (95% interval {of['low']:.2f} to {of['high']:.2f}{noise})"


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return json.dumps(value) if isinstance(value, int) else f"{value:.2f}"
