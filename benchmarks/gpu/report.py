"""What the suite's files say together, as one document."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import tensor

from headstart.infer.measure.candidates import rank_trees
from headstart.infer.measure.costs import Costs
from headstart.infer.measure.ranks import replay

from .entries import read_part
from .job import PARTS
from .report_plot import draw_report
from .thresholds import readings

_PLOT = "suite.png"


def report(folder: Path, draw: bool = True) -> dict[str, Any]:
    """Put together what is in a folder.

    Args:
        draw: whether to write the plot, which needs matplotlib.

    Returns:
        `parts`: for each file its entries' number, errors, seconds and commands; `machines` that
        they come from, `sizes`; `thresholds`, see `readings`; `expected`, see `expected`;
        `decoding`, tokens a second of the trained target, medians; `mixed`, families whose drafters
        were trained anew between two parts; and `plot`, its path or None.
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
        "thresholds": [r.to_dict("toy" not in sizes) for r in readings(parts, worth)],
        "expected": worth,
        "mixed": _mixed(parts),
        "decoding": {family: _speeds(entry) for family, entry in parts["baselines"].items()},
        "plot": None,
    }
    if draw and files and importlib.util.find_spec("matplotlib") is not None:
        found["plot"] = str(draw_report(parts, found, folder / _PLOT))
    return found


def expected(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What rounds timed with random weights are worth with the acceptance of the trained drafters.

    Every round that the trained target's text would have taken with that very tree is counted, from
    the recorded ranks, and costs what a round cost at the random shape. It is no measurement: an
    8 B model with heads of its own accepts something else.
    """
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
    """Tokens a second of each way to decode, and whether all wrote the text of `generate`."""
    speeds = {who: 1e3 / statistics.median(each) for who, each in entry["ms_per_token"].items()}
    return {"tokens_per_second": speeds, "same_text": entry["same_text"]}


def _numbered(value: Any) -> Any:
    """A table by node count, whose keys JSON made strings."""
    return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
