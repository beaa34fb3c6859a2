"""The suite's plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_report(parts: Mapping[str, Any], found: Mapping[str, Any], path: Path) -> Path:
    """Draw verifying, expected speedups, decoding and batches into an image file; of each only
    what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    trees, worth, speeds, batches = figure.subplots(2, 2).flatten()
    _draw_trees(trees, parts)
    _draw_worth(worth, found["expected"])
    _draw_speeds(speeds, found["decoding"])
    _draw_batches(batches, parts, found["expected"])
    for axes in (trees, worth, speeds, batches):
        if not (axes.lines or axes.patches):
            axes.remove()
    if len(drawn := figure.axes) == 1:
        drawn[0].set_subplotspec(figure.add_gridspec(1, 1)[0])
        figure.set_size_inches(7, 4.5)
    figure.savefig(path, dpi=120)
    return path


def _draw_trees(axes: Axes, parts: Mapping[str, Any]) -> None:
    for part in ("costs-1b", "costs-8b"):
        for name, entry in parts[part].items():
            if name.startswith("trees at "):
                times = {int(nodes): each for nodes, each in entry["verify_ms"].items()}
                label = f"{part.removeprefix('costs-')} at {entry['context']}"
                axes.plot(list(times), [t / times[1] for t in times.values()], "o-", label=label)
    axes.set(title="Verifying a tree", xlabel="nodes", ylabel="time over that of one node")
    _legend(axes)


def _draw_worth(axes: Axes, worth: Mapping[str, Any]) -> None:
    found = worth.get("costs-8b", {})
    for side, kind in enumerate(("chain", "tree")):
        heights = [kinds.get(kind, {}).get("speedup", 0.0) for kinds in found.values()]
        places = [place + 0.38 * side for place in range(len(found))]
        axes.bar(places, heights, 0.36, label=f"best {kind}")
    _name(axes, list(found), 0.19)
    axes.set(title="Expected at the 8 B shape (not measured)", ylabel="× plain decoding")


def _draw_speeds(axes: Axes, decoding: Mapping[str, Any]) -> None:
    whos = list(dict.fromkeys(w for of in decoding.values() for w in of["tokens_per_second"]))
    width = 0.9 / max(len(whos), 1)
    for side, who in enumerate(whos):
        known = [(i, of["tokens_per_second"].get(who)) for i, of in enumerate(decoding.values())]
        known = [(place, speed) for place, speed in known if speed]
        places = [place + width * side for place, _ in known]
        axes.bar(places, [speed for _, speed in known], 0.95 * width, label=who)
    _name(axes, list(decoding), 0.45 - width / 2)
    axes.set(title="Decoding the trained target, batch 1", ylabel="tokens a second (median)")


def _draw_batches(axes: Axes, parts: Mapping[str, Any], worth: Mapping[str, Any]) -> None:
    """A colour for each family; what is expected is dashed."""
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for entry in parts["batches"].values():
        lines.setdefault((entry["family"], "o-"), {})[entry["batch"]] = entry["speedup"]
    for name, entry in worth.get("batches-8b", {}).items():
        of = parts["batches-8b"][name]
        lines.setdefault((of["family"], "x--"), {})[of["batch"]] = entry["speedup"]
    families = list(dict.fromkeys(family for family, _ in lines))
    for (family, style), line in lines.items():
        label = family if style == "o-" else f"{family}, 8 B, expected"
        colour = f"C{families.index(family)}"
        axes.plot(list(line), list(line.values()), style, color=colour, label=label)
    sizes = sorted({size for line in lines.values() for size in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(title="Batches, with the planner's tree", xlabel="rows", ylabel="× plain decoding")
    _legend(axes)


def _name(axes: Axes, names: list[str], middle: float) -> None:
    axes.set_xticks([place + middle for place in range(len(names))], names)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """A legend, where anything was drawn."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
