"""The suite's report: what its files say together, as one document, a table and a plot."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.gpu.suite import PARTS, read_part
from benchmarks.gpu.thresholds import readings
from headstart.reports.tables import grid, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_PLOT = "suite.png"
_TITLES = {
    "expected": "Expected of the rounds timed with random weights, best tree and best chain",
    "decoding": "Decoding the trained target, batch 1: tokens a second, medians",
}


def report(folder: Path, draw: bool = True) -> dict[str, Any]:
    """Put together what is in a folder.

    Args:
        draw: whether to write the plot, which needs matplotlib.

    Returns:
        `parts`: for each file its entries' number, errors, seconds and commands; `machines` that
        they come from, `sizes`; `bars`, see `bars`; `expected`, see `expected`; `decoding`, tokens
        a second of the trained target, medians; `mixed`, families whose drafters were trained anew
        between two parts; and `plot`, its path or None.
    """
    files: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        file = read_part(folder / f"{part}.json")
        if file is not None and part != "report":
            files[part] = file
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for part, file in files.items():
        parts[part] = {n: entry for n, entry in file["entries"].items() if "error" not in entry}
    worth = expected(parts)
    machines: list[dict[str, Any]] = []
    for file in files.values():
        of = {k: v for k, v in file["conditions"].items() if k not in ("size", "scale", "corpus")}
        machines += [of] if of not in machines else []
    sizes = sorted({file["conditions"]["size"] for file in files.values()})
    found: dict[str, Any] = {
        "folder": str(folder),
        "sizes": sizes,
        "machines": machines,
        "parts": {part: _summary(file) for part, file in files.items()},
        "bars": [r.to_dict(sizes == ["full"]) for r in readings(parts, worth)],
        "expected": worth,
        "mixed": _mixed(parts),
        "decoding": {family: _speeds(entry) for family, entry in parts["contenders"].items()},
        "plot": None,
    }
    if draw and files and importlib.util.find_spec("matplotlib") is not None:
        found["plot"] = str(_draw(parts, found, folder / _PLOT))
    return found


def expected(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What rounds timed with random weights are worth with the acceptance of the trained drafters.

    Every round that the trained target's text would have taken with that very tree is counted, from
    the recorded ranks, and costs what a round cost at the random shape. It is no measurement: an
    8 B model with heads of its own accepts something else.
    """
    from torch import tensor

    from headstart.infer.measure.candidates import rank_trees
    from headstart.infer.measure.costs import Costs
    from headstart.infer.measure.replay import replay

    ranks = {
        family: [tensor(rows) for rows in entry["ranks"]]
        for family, entry in parts["acceptance"].items()
    }
    worth: dict[str, Any] = {}
    for part in ("costs-1b", "costs-8b"):
        for family, entry in parts[part].items():
            for kind, tree in entry.get("trees", {}).items() if family in ranks else ():
                done = replay(ranks[family], tree["paths"])
                faster = entry["plain_ms"] / tree["round_ms"]
                worth.setdefault(part, {}).setdefault(family, {})[kind] = {
                    "tree": tree["tree"],
                    "nodes": tree["nodes"],
                    "tau": done.tau,
                    "efficiency": faster,
                    "speedup": faster * done.tau,
                }
    for name, entry in parts["batches-8b"].items():
        family = entry["family"]
        if family not in ranks:
            continue
        numbers = {key: _numbered(value) for key, value in entry["costs"].items()}
        costs = Costs(**numbers)
        alike = parts["acceptance"][family]["independent"]
        best = rank_trees(ranks[family], costs, alike, max(costs.verify), entry["batch"])[0]
        pays = best.speedup > 1
        worth.setdefault("batches-8b", {})[name] = {
            "tree": best.name if pays else "plain",
            "nodes": best.nodes if pays else 1,
            "tau": best.tau if pays else 1.0,
            "speedup": best.speedup if pays else 1.0,
        }
    return worth


def print_suite(found: Mapping[str, Any], out: TextIO) -> None:
    """Print the report: colours on a terminal, plain text anywhere else."""
    sizes = ", ".join(found["sizes"]) or "nothing measured"
    console = titled(out, f"headstart bench --suite gpu ({sizes})")
    console.print()
    rows = [("on", f"{of['device']}, {_versions(of)}") for of in found["machines"]]
    rows += [
        (part, f"entries: {of['entries']}, {of['seconds']:.0f} s{_failed(of)}")
        for part, of in found["parts"].items()
    ]
    console.print(grid(rows))
    console.print()
    console.print(_bars(found["bars"]))
    for title, table in (("expected", _worth(found["expected"])), ("decoding", _decoded(found))):
        if table.row_count:
            console.print()
            console.print(_TITLES[title], style="bold")
            console.print(table)
    for said in _remarks(found):
        console.print()
        console.print(said, style="yellow")
    if found["plot"]:
        print(f"\nThe plot is {found['plot']}", file=out)
    print(f"\nThe files are in {found['folder']}", file=out)


def _bars(bars: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each bar, and under it one for each of its values."""
    table = _table(("", "bar"), ("value", "limit"), ("",))
    before = ""
    for bar in bars:
        value = "–" if bar["value"] is None else f"{bar['value']:.3f}"
        said = bar["status"] + (" (expected)" if bar["expected"] else "")
        style = "bold red" if bar["status"] == "missed" else None
        line = [value, bar["limit"], said]
        if not bar["of"]:
            table.add_row(bar["bar"], bar["what"], *line)
            continue
        if bar["bar"] != before:
            table.add_row(bar["bar"], bar["what"])
        table.add_row("", f"  {bar['of']}", *line, style=style)
        before = bar["bar"]
    return table


def _worth(worth: Mapping[str, Any]) -> Table:
    table = _table(("at", "drafter", "tree"), ("nodes", "τ", "efficiency", "× plain"))
    for part in ("costs-1b", "costs-8b"):
        for family, kinds in worth.get(part, {}).items():
            for of in kinds.values():
                figures = [f"{of[key]:.2f}" for key in ("tau", "efficiency", "speedup")]
                shape = part.removeprefix("costs-")
                table.add_row(shape, family, of["tree"], str(of["nodes"]), *figures)
    return table


def _decoded(found: Mapping[str, Any]) -> Table:
    whos = list(dict.fromkeys(w for of in found["decoding"].values() for w in of["same_text"]))
    table = _table(("drafter",), [who.replace("_", " ") for who in whos], ("same text",))
    for family, of in found["decoding"].items():
        speeds = [of["tokens_per_second"].get(who) for who in whos]
        differ = [who for who, same in of["same_text"].items() if not same]
        said = f"not {', '.join(differ)}" if differ else "all"
        table.add_row(family, *(f"{speed:.0f}" if speed else "–" for speed in speeds), said)
    return table


def _table(names: Sequence[str], figures: Sequence[str], last: Sequence[str] = ()) -> Table:
    """An empty table: names on the left, figures to the right, and more names."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="cyan")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _remarks(found: Mapping[str, Any]) -> list[str]:
    said = []
    if "toy" in found["sizes"]:
        said.append("Toy sizes show that everything runs; no figure of them says anything.")
    if len(found["machines"]) > 1:
        said.append("The parts come from different machines; do not compare across them.")
    if found["mixed"]:
        said.append(
            f"Trained anew between parts: {', '.join(found['mixed'])}; measure acceptance again."
        )
    if found["expected"]:
        said.append(
            "Expected: rounds timed with random weights, times the acceptance of the trained "
            "target's drafters; not a measured speedup."
        )
    return said


def _summary(file: Mapping[str, Any]) -> dict[str, Any]:
    entries = file["entries"]
    return {
        "entries": len(entries),
        "seconds": sum(entry["seconds"] for entry in entries.values()),
        "errors": {name: e["error"] for name, e in entries.items() if "error" in e},
        "commands": file["commands"],
    }


def _mixed(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    seen: dict[str, set[str]] = {}
    for entries in parts.values():
        for name, entry in entries.items():
            if "trained" in entry:
                seen.setdefault(entry.get("family", name), set()).add(entry["trained"])
    return sorted(family for family, ids in seen.items() if len(ids) > 1)


def _speeds(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens a second of each contender, and whether all wrote the text of `generate`."""
    speeds = {who: 1e3 / statistics.median(each) for who, each in entry["ms_per_token"].items()}
    return {"tokens_per_second": speeds, "same_text": entry["same_text"]}


def _versions(of: Mapping[str, Any]) -> str:
    wanted = ("torch", "transformers")
    parts = [f"{name} {of['versions'][name]}" for name in wanted if name in of["versions"]]
    return ", ".join([*parts, *([f"driver {of['driver']}"] if of.get("driver") else [])])


def _failed(of: Mapping[str, Any]) -> str:
    return f", FAILED: {'; '.join(of['errors'])}" if of["errors"] else ""


def _numbered(value: Any) -> Any:
    """A table by node count, whose keys JSON made strings."""
    return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _draw(parts: Mapping[str, Any], found: Mapping[str, Any], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    trees, worth, speeds, batches = figure.subplots(2, 2).flatten()
    _draw_trees(trees, parts)
    _draw_worth(worth, found["expected"])
    _draw_speeds(speeds, found["decoding"])
    _draw_batches(batches, parts, found["expected"])
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
