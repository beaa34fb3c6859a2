"""The thresholds of the GPU suite: what must hold, each as a ratio of figures from one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]
"""The entries of each part that were measured, by name."""


@dataclass(frozen=True)
class Limit:
    """What a value must be: at least, or at most, so much."""

    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        if self.least is not None:
            return f"≥ {self.least:g}"
        return "–" if self.most is None else f"≤ {self.most:g}"

    def holds(self, value: float) -> bool | None:
        """Whether a value passes; None where there is no limit."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


THRESHOLDS: dict[str, tuple[str, Limit]] = {
    "1a": ("plain decoding, share of the copy bandwidth", Limit(least=0.6)),
    "1b": ("plain decoding, times as fast as eager generate", Limit(least=1)),
    "1c": ("plain decoding, its time over a bare loop's", Limit(most=1.05)),
    "1d": ("plain decoding, compiled, share of the copy bandwidth", Limit(least=0.75)),
    "1e": ("plain decoding, compiled, times as fast as generate with a static cache", Limit()),
    "2a": ("verifying 64 nodes over one, 2k context", Limit(most=1.15)),
    "2b": ("verifying 128 nodes over one, 2k context", Limit(most=1.35)),
    "2c": ("verifying 64 nodes over one, 32k context", Limit(most=1.25)),
    "3": ("share of a round outside both forwards", Limit(most=0.05)),
    "4": ("efficiency: speedup over plain decoding ÷ τ", Limit()),
    "5": ("a draft model, times generate with it as assistant", Limit()),
    "6": ("best tree, times as fast as the best chain", Limit(least=1.15)),
    "7": ("a batch with the planner's tree, times plain decoding", Limit(least=0.98)),
    "8": ("peak memory over plain + drafter's weights + its cache", Limit(most=1.03)),
    "9": ("texts in float32 that differ by more than a near-tie", Limit(most=0)),
}
"""Every threshold: what it says, and its limit, where readings have none of their own."""

EFFICIENCY = {
    "medusa": 0.72, "medusa2": 0.72, "hydra": 0.65, "redrafter": 0.58, "eagle": 0.52,
    "eagle3": 0.52, "draft_model": 0.6,
}  # fmt: skip
"""Least efficiency by family; published runtimes reach 0.53 … 0.74 over a slower baseline."""

ASSISTANT = Limit(least=3)
"""Of a draft model's chain against the same chain under `generate`."""


def batch_limit(batch: int) -> Limit:
    """What a batch should gain: rows share the reading of the weights, until arithmetic binds."""
    if batch in (2, 3, 4):
        return Limit(least=2)
    return Limit(least=1.6) if batch == 8 else THRESHOLDS["7"][1]


@dataclass(frozen=True)
class Reading:
    """One value for one threshold.

    Attributes:
        threshold: its key in `THRESHOLDS`; of: which family, batch or tree it is for.
        value: None where it was not measured.
        expected: whether it joins one model's costs and another's acceptance.
        own: its limit, where that is not the threshold's.
    """

    threshold: str
    of: str
    value: float | None
    expected: bool = False
    own: Limit | None = None

    @property
    def limit(self) -> Limit:
        """What the value must be."""
        return THRESHOLDS[self.threshold][1] if self.own is None else self.own

    def status(self, judged: bool = True) -> str:
        """met, missed, no limit, or not measured; not judged where a limit is not meant for it.

        Exactness knows no size, and is always judged.
        """
        if self.value is None:
            return "not measured"
        holds = self.limit.holds(self.value)
        if holds is None:
            return "no limit"
        return ("met" if holds else "missed") if judged or self.threshold == "9" else "not judged"

    def to_dict(self, judged: bool) -> dict[str, Any]:
        """As it stands in the report."""
        return {
            "threshold": self.threshold, "what": THRESHOLDS[self.threshold][0], "of": self.of,
            "value": self.value,
            "limit": str(self.limit), "status": self.status(judged), "expected": self.expected,
        }  # fmt: skip


def readings(parts: Parts, worth: Mapping[str, Any]) -> list[Reading]:
    """Every threshold with all its values; one without any has a reading that says so.

    Args:
        worth: what the costs are expected to be worth, see `report.expected`.
    """
    found = [*_plain(parts), *_trees(parts), *_rounds(parts), *_decoding(parts, worth)]
    known = {reading.threshold for reading in found}
    found += [Reading(key, "", None) for key in THRESHOLDS if key not in known]
    return sorted(found, key=lambda reading: list(THRESHOLDS).index(reading.threshold))


def _plain(parts: Parts) -> Iterator[Reading]:
    for part in ("costs-8b", "costs-1b"):
        of = part.removeprefix("costs-")
        for key, name in (("1a", "plain"), ("1d", "compiled")):
            if entry := parts[part].get(name):
                speed = entry["bytes_per_token"] / (entry[f"{name}_ms_per_token"] * 1e6)  # GB/s
                share = speed / entry["copy_gb_per_s"]
                yield Reading(key, of, share, own=None if of == "8b" else Limit())
                if rival := entry.get("generate_static_ms_per_token"):
                    yield Reading("1e", of, rival / entry["compiled_ms_per_token"])
        if plain := parts[part].get("plain"):
            milliseconds = plain["plain_ms_per_token"]
            yield Reading("1b", of, plain["generate_ms_per_token"] / milliseconds)
            yield Reading("1c", of, milliseconds / plain["bare_ms_per_token"])


def _trees(parts: Parts) -> Iterator[Reading]:
    """Of the 8 B shape: the shorter context that was timed, then the longer one."""
    entries = [e for name, e in parts["costs-8b"].items() if name.startswith("trees at ")]
    entries.sort(key=lambda entry: entry["context"])
    wanted = [(("2a", "64"), ("2b", "128")), (("2c", "64"),)]
    for entry, keys in zip(entries, wanted, strict=False):
        times = entry["verify_ms"]
        for key, nodes in keys:
            if nodes in times:
                yield Reading(key, f"8b at {entry['context']}", times[nodes] / times["1"])


def _rounds(parts: Parts) -> Iterator[Reading]:
    plain = parts["costs-8b"].get("plain", {}).get("peak_bytes")
    for name, entry in parts["costs-8b"].items():
        for kind, tree in entry.get("trees", {}).items():
            of = f"{name}, {kind} of {tree['nodes']}"
            inside = tree["parts"]  # of the same rounds
            forwards = inside["draft"] + inside["verify"]
            yield Reading("3", of, 1 - forwards / inside["round"])
            least = Limit(least=EFFICIENCY.get(entry.get("family", name)))
            yield Reading("4", of, entry["plain_ms"] / tree["round_ms"], own=least)
            if plain and tree["peak_bytes"]:
                fair = plain + entry["weight_bytes"] + entry["cache_bytes"]
                yield Reading("8", of, tree["peak_bytes"] / fair)


def _decoding(parts: Parts, worth: Mapping[str, Any]) -> Iterator[Reading]:
    for family, entry in parts["baselines"].items():
        times = entry["ms_per_token"]
        for rival, ours in product(("assistant", "assistant_default"), ("chain", "tree")):
            if rival in times:
                of = f"{family}, {ours} against {rival.replace('_', ' ')}"
                alike = (rival, ours) == ("assistant", "chain")
                times_faster = ratio(times[rival], times[ours])
                yield Reading("5", of, times_faster, own=ASSISTANT if alike else None)
        yield Reading("6", family, ratio(times["chain"], times["tree"]))
    for family, kinds in worth.get("costs-8b", {}).items():
        if {"tree", "chain"} <= set(kinds):
            better = kinds["tree"]["speedup"] / kinds["chain"]["speedup"]
            yield Reading("6", f"{family}, 8b", better, expected=True)
    for name, entry in parts["batches"].items():
        of, limit = f"{name}, {entry['policy']}", batch_limit(entry["batch"])
        yield Reading("7", of, entry["speedup"], own=limit)
    for name, entry in worth.get("batches-8b", {}).items():
        of, limit = f"{name}, 8b, {entry['tree']}", batch_limit(parts["batches-8b"][name]["batch"])
        yield Reading("7", of, entry["speedup"], expected=True, own=limit)
    for family, entry in parts["identity"].items():
        yield Reading("9", family, entry["divergences"] - entry["near_ties"])


def ratio(slower: list[float], faster: list[float]) -> float:
    """The median over prompts of one way's time over another's, from the same turns."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))
