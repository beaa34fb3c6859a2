"""The plot of a plan: speedup against tree size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plans import at_once

if TYPE_CHECKING:
    from headstart.heads.artifacts.plan import Plan

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


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw speedup against tree size, expected and measured, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
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
