"""A plan for people: the table of candidates, what is expected in plain words, and a plot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headstart.infer.trees.paths import RankPaths

from .measured import shown
from .tables import column_table, grid, print_apart, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedModel

    from headstart.heads.artifacts.plan import Plan
    from headstart.heads.artifacts.source import DrafterSource

_SHOWN = 12  # candidates in the table
_FIGURES = ("nodes", "depth", "τ", "ms/round", "× plain", "measured")
_FEW = ("τ", "× plain", "measured")
_WIDE = 60  # columns of a terminal that all of them fit into, beside a name that is wrapped
_FORMATS = (".png", ".svg", ".pdf")


def print_plan(plan: Plan, out: TextIO) -> None:
    """Print candidates, costs and the choice: colours on a terminal, plain text anywhere else."""
    console = titled(out, "headstart plan")
    # The name nearly tells nodes and depth, and the rest follows from the speedup.
    kept = _FIGURES if console.width >= _WIDE else _FEW
    table = column_table(("tree",), kept)
    for candidate in plan.candidates[:_SHOWN]:
        chosen = candidate["name"] == plan.policy
        name, *figures = _row(candidate)
        row = [figures[_FIGURES.index(key)] for key in kept]
        table.add_row(name, *row, style="bold green" if chosen else None)
    print_apart(console, table)
    if (more := len(plan.candidates) - _SHOWN) > 0:
        console.print(f"  … and {more} slower", style="dim")
    print_apart(console, grid(_cost_rows(plan)), *_sentences(plan))


def said_of_plan(plan: Plan) -> str:
    """What the plan expects, in a sentence or two."""
    requests = requests_of(plan.batch_size, plan.temperature)
    where = f"On this machine ({plan.device}, {plan.dtype}, {requests})"
    best = plan.candidates[0]
    fast = _times(best)
    if plan.tree:
        label = RankPaths(plan.tree).label  # as bench and inspect call it
        also = "" if label == plan.policy else f" ({label})"
        return (
            f"{where}, {plan.policy}{also} decodes fastest: it is expected to write {plan.tau:.2f} "
            f"tokens per round and to decode {fast} as fast as plain decoding."
        )
    return (
        f"{where}, nothing pays: the best tree, {best['name']}, decodes {fast} as fast as "
        "plain decoding. The plan is to decode plainly."
    )


_LARGE = 0.1  # of a round, in the heads' output layer
_QUARTER = 0.25


def _trimming(plan: Plan) -> list[str]:
    """Where the heads' output layer takes much of a round, when a smaller one would pay."""
    output = plan.costs.get("output", 0.0)
    round_ms = plan.candidates[0]["round_ms"]
    saved = (1 - _QUARTER) * output
    if output < _LARGE * round_ms:
        return []
    return [
        f"The heads' output layer takes {output:.2f} ms of a round of {round_ms:.2f} ms. One over "
        f"the most frequent quarter of the vocabulary (headstart trim) saves about {saved:.2f} ms: "
        f"it pays where it costs less than {saved / round_ms:.0%} of the tokens per round."
    ]


def _sentences(plan: Plan) -> list[str]:
    """What the plan expects, and what that holds for."""
    return [said_of_plan(plan), *_trimming(plan), held_for(plan)]


def held_for(plan: Plan) -> str:
    """The text that a plan holds for."""
    written, others = "greedily", "at a temperature above 0 fewer drafted tokens are right"
    if plan.temperature:
        written = f"at temperature {plan.temperature:g}"
        others = "other temperatures need plans of their own"
    return (
        f"It holds for text like that of {_these(plan.prompts)}, written {written}; "
        f"{others} (headstart plan --temperature)."
    )


def said_of_unused(source: DrafterSource, target: PreTrainedModel) -> list[str]:
    """That an artifact has plans, and none for this target on this machine."""
    from headstart.heads.artifacts.plan import dtype_name, machine, read_plans
    from headstart.heads.artifacts.source import SourceKind

    plans = read_plans(source.folder) if source.kind is SourceKind.ARTIFACT else []
    if not plans or source.plans(target):
        return []
    here = f"{machine(target)}, {dtype_name(target)}"
    others = {f"{plan.device}, {plan.dtype}": None for plan in plans}
    if here in others:
        said = "plans for other weights, which are not used"
    else:
        said = f"plans for {' and '.join(others)}, and none for {here}"
    return [f"{source} has {said}: it drafts the tree of its training (headstart plan)."]


def _these(prompts: int) -> str:
    return "this one prompt" if prompts == 1 else f"these {prompts} prompts"


def _row(candidate: dict[str, Any]) -> list[str]:
    names, figures = ("name", "nodes", "depth"), ("tau", "round_ms", "speedup", "measured_speedup")
    numbers = [shown(candidate, key, "{:.2f}") or "–" for key in figures]
    return [*(str(candidate[key]) for key in names), *numbers]


def _cost_rows(plan: Plan) -> list[tuple[str, str]]:
    costs = plan.costs
    return [
        ("forwards", f"with {plan.forwards}" if plan.forwards != "torch" else "by torch alone"),
        ("a plain round", f"{costs['plain']:.2f} ms"),
        ("verifying n nodes", _by_size(costs["verify"])),
        ("drafting: begin", f"{costs['begin']:.2f} ms"),
        ("… its output layer", f"{costs.get('output', 0.0):.2f} ms"),
        ("drafting: a level of n nodes", _by_size(costs["extend"])),
        ("prompts, new tokens", f"{plan.prompts}, {plan.new_tokens} each"),
    ]


def _by_size(costs: dict[Any, float]) -> str:
    sizes = [size for size in costs if int(size).bit_count() == 1]  # powers of two
    return "  ".join(f"{size}: {costs[size]:.2f}" for size in sizes) + " ms" if sizes else ""


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


def requests_of(batch_size: int, temperature: float) -> str:
    """The requests that a plan is for, in words.

    >>> requests_of(1, 0.0), requests_of(4, 0.7)
    ('one prompt at a time', '4 prompts at a time at temperature 0.7')
    """
    prompts = "one prompt at a time" if batch_size == 1 else f"{batch_size} prompts at a time"
    return f"{prompts} at temperature {temperature:g}" if temperature else prompts


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before anything is measured for it."""
    if path.suffix not in _FORMATS or not path.parent.is_dir():
        raise ValueError(
            f"--plot is {str(path)!r}; expected a file in an existing folder, named "
            f"{', '.join(_FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw speedup against tree size, expected and measured, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    draw_candidates(axes, plan)
    requests = requests_of(plan.batch_size, plan.temperature)
    axes.set_title(f"{plan.device}, {plan.dtype}, {requests}")
    figure.savefig(path, dpi=150)


def draw_candidates(axes: Axes, plan: Plan) -> None:
    """Speedup against tree size: a line for each kind of tree, crosses where it was measured."""
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
    if measured := [c for c in plan.candidates if c["measured_speedup"] is not None]:
        nodes, speedup = zip(*((c["nodes"], c["measured_speedup"]) for c in measured), strict=True)
        ink = axes.xaxis.label.get_color()  # the page's own, dark or light
        axes.plot(nodes, speedup, "x", color=ink, label="measured", ms=7, zorder=3)
    axes.axhline(1, color="gray", linestyle=":", label="plain decoding")
    best, sizes = plan.candidates[0], [c["nodes"] for c in plan.candidates]
    if plan.tree:
        left = best["nodes"] ** 2 < min(sizes) * max(sizes)  # of the axis, which is logarithmic
        height = best["speedup"] if best["measured_speedup"] is None else best["measured_speedup"]
        axes.annotate(
            f"chosen: {plan.policy}", (best["nodes"], height), (14 if left else -14, 16),
            va="bottom", ha="left" if left else "right", textcoords="offset points",
            arrowprops={"arrowstyle": "->", "color": axes.xaxis.label.get_color()},
        )  # fmt: skip
    first, last = (max(size - 1, 0).bit_length() for size in (min(sizes), max(sizes)))
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in range(first, last + 1)])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.set_xlabel("nodes of the tree, including the root")
    axes.set_ylabel("× plain decoding")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
