"""The plot of a training's `metrics.jsonl`: what was learnt, what is accepted, what it took."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report.drawings import depth_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[str, Any]

# Of a line of training: the title, the name, and what it is divided by.
_TOOK = (
    ("tokens per second", "tokens_per_second", 1.0),
    ("memory, GB", "memory_bytes", 1e9),
    ("share of the GPU's peak", "share_of_peak", 1.0),
)


_COLUMNS = 3  # of panels
_BELOW: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": 3}
_BESIDE: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
"""Where a legend covers no line."""


def draw_metrics(metrics: Path, image: Path, best: int | None = None) -> bool:
    """Draw a file of metrics into an image; False without matplotlib, or with nothing to draw.

    Args:
        best: the step of the checkpoint that became the artifact.
    """
    trained, validated = read_metrics(metrics)
    if importlib.util.find_spec("matplotlib") is None or not (trained or validated):
        return False
    from matplotlib.figure import Figure

    took = [each for each in _TOOK if any(line.get(each[1]) is not None for line in trained)]
    draws = [partial(draw_loss, lines=trained)]
    if any("accuracy_by_depth" in line for line in trained):
        draws.append(partial(draw_by_depth, lines=trained, name="accuracy"))
    draws.append(partial(draw_tau, lines=validated, best=best))
    draws.append(partial(draw_by_depth, lines=validated, name="acceptance"))
    draws += [partial(_draw_one, lines=trained, title=t, name=n, unit=u) for t, n, u in took]
    rows = -(-len(draws) // _COLUMNS)
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, squeeze=False).flatten()
    for axes, draw in zip(panels, draws, strict=False):
        draw(axes)
        axes.tick_params(labelbottom=True)  # also where there is a panel below
    for axes in panels[len(draws) :]:
        axes.remove()
    figure.savefig(image, dpi=120, metadata={"Software": None})
    return True


def _draw_one(axes: Axes, lines: list[Line], title: str, name: str, unit: float) -> None:
    """A figure of which each line of training has one."""
    known = [line for line in lines if line.get(name) is not None]
    values = [line[name] / unit for line in known]
    axes.plot([line["step"] for line in known], values)
    axes.set_ylim(0, 1.1 * max(values) or 1)
    _over_steps(axes, title)


def _over_steps(axes: Axes, title: str) -> None:
    axes.set(title=title, xlabel="step")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)


def read_metrics(metrics: Path) -> tuple[list[Line], list[Line]]:
    """The lines of training and those of validation; none where there is no file."""
    if not metrics.is_file():
        return [], []
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if line.get("loss") is not None]
    return trained, [line for line in lines if line.get("tau") is not None]


def draw_loss(axes: Axes, lines: list[Line]) -> None:
    """The loss over the steps."""
    few = "." if len(lines) < 20 else ""
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], marker=few)
    _over_steps(axes, "loss")


def draw_tau(axes: Axes, lines: list[Line], best: int | None) -> None:
    """τ over the steps with its standard error, and which step was kept."""
    steps = [line["step"] for line in lines]
    errors = [line.get("tau_se") or 0.0 for line in lines]
    taus = [line["tau"] for line in lines]
    if simulated := [line for line in lines if line.get("simulated_tau") is not None]:
        axes.plot(
            [line["step"] for line in simulated], [line["simulated_tau"] for line in simulated],
            "s--", color="C1", ms=7, mfc="none", zorder=3, label="simulated from ranks",
        )  # fmt: skip
    axes.errorbar(steps, taus, errors, color="C0", marker="o", ms=4, capsize=2, label="decoded")
    if best is not None and best in steps:
        axes.axvline(best, color="gray", ls=":", zorder=0, label="kept")
    _over_steps(axes, "tokens per round, τ")
    if len(lines) == 1:  # no course to look at: its height is the figure
        axes.set_ylim(0, 1.1 * (taus[0] + errors[0]))
    if lines:
        axes.legend(fontsize="small", **_BELOW)


def draw_by_depth(axes: Axes, lines: list[Line], name: str) -> None:
    """`acceptance` or `accuracy` over the steps: a line for each depth that was ever reached."""
    known = [(line["step"], line.get(f"{name}_by_depth") or ()) for line in lines]
    few = "o-" if len(lines) < 20 else "-"
    for depth in range(max((len(shares) for _, shares in known), default=0)):
        points = [
            (step, shares[depth])
            for step, shares in known
            if len(shares) > depth and shares[depth] is not None
        ]
        if points:
            color = depth_color(depth + 1)
            axes.plot(*zip(*points, strict=True), few, ms=3, color=color, label=f"{depth + 1}")
    axes.set_ylim(0, 1.02)
    _over_steps(axes, f"{name} by depth")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", title="depth", title_fontsize="small", **_BESIDE)
