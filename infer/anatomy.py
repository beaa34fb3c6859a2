"""Where the time of a round goes, as it runs: draft, grow, verify, commit, and the rest."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads import Sampling

from .loop import Decoding
from .rules import RULES
from .speculator import Speculator
from .timing import Stopwatch

_WARM_UP = 3  # rounds that are not counted


@torch.no_grad()
def dissect(speculator: Speculator, ids: Tensor, rounds: int) -> tuple[dict[str, float], int]:
    """Decode greedily, and note when each part of a round begins and ends.

    Args:
        ids: [B, P] int64, without padding.
        rounds: counted, after a few that warm up.

    Returns:
        Milliseconds a round, medians: `round` as a whole; `draft`, the drafter's forwards; `grow`,
        what else the tree took; `verify`, the target's forward; `commit`, the cache; `accept`, all
        that is left, the host's read with it. And the bytes of the drafter's state.
    """
    target, drafter, tree = speculator.target, speculator.drafter, speculator.tree
    none = LogitsProcessorList()
    decoding = Decoding(target, drafter, tree, Sampling(None, none), rule=RULES["greedy"])
    wanted = (rounds + _WARM_UP + 1) * (tree.max_depth + 1)
    decoding.prefill(ids, torch.ones_like(ids), wanted)
    watch = Stopwatch(ids.device)
    spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    owners = {"grow": (tree, ["grow"]), "verify": (target, ["verify"])}
    owners["commit"] = (target, ["commit"])
    if drafter is not None:
        owners["draft"] = (drafter, ["begin", "extend"])
    found: dict[str, list[float]] = defaultdict(list)
    with _watched(owners, spans, watch):
        for number in range(rounds + _WARM_UP):
            spans.clear()
            begun = watch.mark()
            decoding.round()
            spans["round"].append((begun, watch.mark()))
            if number < _WARM_UP:
                continue
            took = {part: sum(watch.between(*span) for span in spans[part]) for part in
                    ("round", "draft", "grow", "verify", "commit")}  # fmt: skip
            took["grow"] -= took["draft"]
            inside = ("draft", "grow", "verify", "commit")
            took["accept"] = took["round"] - sum(took[part] for part in inside)
            for part, milliseconds in took.items():
                found[part].append(milliseconds)
    return {part: statistics.median(each) for part, each in found.items()}, held(decoding.state)


@contextmanager
def _watched(
    owners: Mapping[str, tuple[Any, list[str]]],
    spans: dict[str, list[tuple[Any, Any]]],
    watch: Stopwatch,
) -> Iterator[None]:
    """Note when methods of single objects begin and end, by the part that they belong to."""

    def watched(part: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = watch.mark()
            answer = method(*args, **kwargs)
            spans[part].append((begun, watch.mark()))
            return answer

        return call

    patches = [(part, owner, name) for part, (owner, names) in owners.items() for name in names]
    for part, owner, name in patches:
        object.__setattr__(owner, name, watched(part, getattr(owner, name)))
    try:
        yield
    finally:
        for _, owner, name in patches:
            object.__delattr__(owner, name)


def held(state: Any) -> int:
    """Bytes of the distinct storages that a drafter's state reaches.

    >>> text = torch.zeros(4, 8)
    >>> held({"text": text, "views": [text[0], text[1]]})
    128
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, Mapping):
            for value in item.values():
                walk(value)
        elif isinstance(item, list | tuple):
            for value in item:
                walk(value)
        elif is_dataclass(item) and not isinstance(item, type):
            for field in fields(item):
                walk(getattr(item, field.name, None))
        elif hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module | type):
            walk(vars(item))

    walk(state)
    return sum(sizes.values())
