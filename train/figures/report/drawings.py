"""The pictures of a report, each drawn into one Axes of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3b82f6", "#e8590c", "#12a150", "#c443c9", "#d99a00", "#06a3b7", "#e5484d", "#8aa00a")
"""Read on dark and on light."""

DEPTHS = (
    "#3b82f6", "#06a3b7", "#12a150", "#8aa00a", "#d99a00", "#ee7214", "#e5484d", "#c443c9",
)  # fmt: skip
"""Of depth 1, 2, …; the last one serves all deeper ones."""

TRIED = 20  # drafted tokens, below which a share of them is left out
_LABELLED = 26  # nodes of a tree that all carry their figure


def depth_color(depth: int) -> str:
    """The colour of a depth from 1."""
    return DEPTHS[min(depth, len(DEPTHS)) - 1]


def acceptance_by_depth(axes: Axes, shares: Mapping[str, Sequence[float | None]]) -> None:
    """Bars of one way in the depths' colours; lines where there are several ways."""
    known = {
        name: [(d, s) for d, s in enumerate(each, 1) if s is not None and math.isfinite(s)]
        for name, each in shares.items()
    }
    for number, (name, points) in enumerate(known.items()):
        places = [d for d, _ in points]
        heights = [100 * s for _, s in points]
        if len(known) == 1:
            axes.bar(places, heights, color=[depth_color(d) for d in places], width=0.7)
            if len(places) <= 10:
                for place, height in zip(places, heights, strict=True):
                    _above(axes, place, height, f"{height:.0f}%")
        else:
            color = COLORS[number % len(COLORS)]
            axes.plot(places, heights, "o-", color=color, ms=4, label=name)
    axes.set(xlabel="depth of the drafted token", ylim=(0, 112))
    axes.set_ylabel("accepted, %")
    deepest = max((d for points in known.values() for d, _ in points), default=1)
    axes.set_xticks(range(1, deepest + 1, 1 if deepest <= 12 else 2))
    if len(known) > 1:
        axes.legend(fontsize="small")


def acceptance_of_trees(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    """A line for each tree and temperature, dashed above 0, with binomial standard errors.

    Where fewer than `TRIED` tokens were drafted at a depth after accepted ones there is no point.

    Args:
        found: what `tau_table` returns.
    """
    trees = list(dict.fromkeys(of["tree"] for of in found))
    for of in found:
        color, warm = COLORS[trees.index(of["tree"]) % len(COLORS)], of["temperature"] > 0
        points, tried = [], float(of["rounds"])
        for depth, share in enumerate(of["acceptance_by_depth"], 1):
            if share is None or tried < TRIED:
                break
            points.append((depth, 100 * share, 100 * math.sqrt(share * (1 - share) / tried)))
            tried *= share
        if points:
            axes.errorbar(
                *zip(*points, strict=True), fmt="s--" if warm else "o-", color=color, ms=4,
                capsize=2, mfc="white" if warm else color,
                label=f"{of['tree']}, temperature {of['temperature']}",
            )  # fmt: skip
    axes.set(xlabel="depth of the drafted token", ylabel="accepted, %", ylim=(0, 103))
    deepest = max((len(of["acceptance_by_depth"]) for of in found), default=1)
    axes.set_xlim(0.8, deepest + 0.2)
    axes.set_xticks(range(1, deepest + 1, 1 if deepest <= 12 else 2))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def token_tree(axes: Axes, paths: Sequence[Sequence[int]], shares: Sequence[float] | None) -> None:
    """The tree from left to right, the drafter's best child on top.

    Args:
        paths: rank paths without the root.
        shares: of each path, how often it is what the target wrote; None where that is not known.
    """
    known = sorted({tuple(path) for path in paths})
    share = dict(zip(map(tuple, paths), shares or (), strict=False))
    leaves = [p for p in known if not any(o[: len(p)] == p and len(o) > len(p) for o in known)]
    height = {leaf: -float(place) for place, leaf in enumerate(leaves)}

    def place(path: tuple[int, ...]) -> float:
        if path not in height:
            below = [place(p) for p in known if len(p) == len(path) + 1 and p[:-1] == path]
            height[path] = max(below, default=0.0)
        return height[path]

    likely = sorted(known, key=lambda path: -share.get(path, 0.0))[:_LABELLED]
    likely = [path for path in likely if share.get(path, 0.0) >= 0.005]
    axes.plot(0, place(()), "o", ms=9, color="gray")
    for path in known:
        x, y = len(path), place(path)
        axes.plot([x - 1, x], [place(path[:-1]), y], color="gray", lw=1, alpha=0.6, zorder=0)
        size = 4 + 8 * math.sqrt(share.get(path, 0.3))
        axes.plot(x, y, "o", ms=size, color=depth_color(len(path)))
        if path in likely:  # to the right of the line that comes from above
            axes.annotate(f"{share[path]:.0%}", (x, y), (3, 6), textcoords="offset points",
                          fontsize="x-small")  # fmt: skip
    deepest = max(map(len, known), default=1)
    axes.set(xlim=(-0.4, deepest + 0.4), ylim=(-len(leaves) + 0.4, 0.8), yticks=[])
    axes.set_xticks(range(deepest + 1), ["root", *map(str, range(1, deepest + 1))])
    axes.set_xlabel("depth")
    axes.spines["left"].set_visible(False)


def round_parts(axes: Axes, parts: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each way: milliseconds of a round by what takes them.

    What is too narrow for its figure has none among several ways; of a single one the legend has
    all figures.
    """
    labels = {"verify": "the target verifies", "draft": "the drafter drafts", "loop": "the loop"}
    left = [0.0] * len(parts)
    for (name, label), color in zip(labels.items(), COLORS, strict=False):
        widths = [max(of.get(name, 0.0), 0.0) for of in parts.values()]
        if len(parts) == 1:
            label = f"{label}: {widths[0]:.2f}"
        axes.barh(range(len(parts)), widths, left=left, color=color, height=0.55, label=label)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            widest = max(sum(of.values()) for of in parts.values())
            if len(parts) > 1 and width > 0.13 * widest:
                axes.annotate(f"{width:.2f}", (start + width / 2, row), ha="center", va="center",
                              color="white", fontsize="small")  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _rows(axes, list(parts))
    axes.set_xlabel("milliseconds per round")
    axes.figure.legend(fontsize="small", loc="outside lower center", ncols=3, handlelength=1,
                       columnspacing=0.9)  # fmt: skip


def ratios(axes: Axes, found: Mapping[str, Mapping[str, Any]], label: str) -> None:
    """A row for each name: median ratio, its 95% interval, and the extreme prompts as a thin line.

    Where the interval holds 1 the point is hollow.
    """
    for row, of in enumerate(found.values()):
        axes.plot([of["min"], of["max"]], [row, row], color="gray", lw=1, alpha=0.6)
        if of.get("low") is not None:
            axes.plot([of["low"], of["high"]], [row, row], color=COLORS[0], lw=4, alpha=0.45,
                      solid_capstyle="round")  # fmt: skip
        hollow = "none" if of.get("within_noise") else COLORS[0]
        axes.plot(of["median"], row, "o", ms=7, mec=COLORS[0], mfc=hollow)
        axes.annotate(f"{of['median']:.2f}", (of["median"], row), (0, 7),
                      textcoords="offset points", ha="center", fontsize="small")  # fmt: skip
    axes.axvline(1, color="gray", ls=":", lw=1)
    _rows(axes, list(found))
    axes.set_xlim(left=0, right=1.08 * max((of["max"] for of in found.values()), default=1.0))
    axes.set_xlabel(label)


def values(axes: Axes, found: Mapping[str, float], label: str, least: float = 0.0) -> None:
    """A bar for each name, with its figure."""
    top = max(found.values(), default=1.0)
    axes.barh(range(len(found)), list(found.values()), color=COLORS[0], height=0.6, alpha=0.85)
    for row, value in enumerate(found.values()):
        axes.annotate(f"{value:.2f}", (value, row), (4, 0), textcoords="offset points",
                      va="center", fontsize="small")  # fmt: skip
    _rows(axes, list(found))
    axes.set_xlim(least, top + 0.14 * (top - least))
    axes.set_xlabel(label)


def by_prompt(axes: Axes, each: Mapping[str, Sequence[float]], label: str) -> None:
    """The prompts from the lowest value to the highest, a line for each name; dotted: plain's 1."""
    axes.axhline(1, color="gray", ls=":", lw=1)
    most = 1.0
    for number, (name, found) in enumerate(each.items()):
        known = sorted(value for value in found if math.isfinite(value))
        most = max([most, *known])
        color = COLORS[number % len(COLORS)]
        style = "o-" if len(known) <= 60 else "-"
        axes.plot(range(1, len(known) + 1), known, style, ms=3.5, lw=1, color=color, label=name)
    axes.set(xlabel="prompts, sorted", ylabel=label, ylim=(0, 1.08 * most))
    axes.locator_params("x", integer=True)
    if len(each) > 1:
        axes.legend(fontsize="small")


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left, the first on top; long ones are cut into lines."""
    axes.set_yticks(range(len(names)), [_cut(name) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)


def _cut(name: str, width: int = 22) -> str:
    """A name in lines of at most so many characters, broken at commas and spaces."""
    lines = [""]
    for word in name.split(" "):
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if len(lines[-1] + word) < width else [
            lines[-1], word,
        ]  # fmt: skip
    return "\n".join(line for line in lines if line)


def _above(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center",
                  fontsize="small")  # fmt: skip
