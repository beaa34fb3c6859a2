"""Where the time of a round goes: draft, grow, verify, commit, and the rest."""

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
from headstart.infer.graphs import RoundGraphs
from headstart.infer.loop import Decoding
from headstart.infer.measure.timing import Stopwatch
from headstart.infer.request import Request
from headstart.infer.rules.registry import RULES
from headstart.infer.speculator import Speculator

_WARM_UP = 3  # rounds that are not counted: as written, captured, and a round ahead
_TOGETHER = 8  # captured rounds that are timed as a whole, since the host runs ahead of them


@torch.no_grad()
def profile_rounds(
    speculator: Speculator, ids: Tensor, rounds: int
) -> tuple[dict[str, float], int]:
    """Decode greedily, and note when each part of a round begins and ends.

    Of captured rounds the marks are part of the graph. Then some rounds are timed together, as they
    follow each other, and the parts are those of the last one; those among which another graph was
    captured do not count. Where the host runs each round itself, so is each timed.

    Args:
        ids: [B, P] int64, without padding.
        rounds: counted, after a few that warm up.

    Returns:
        Milliseconds a round, medians: `round` as a whole; `draft`, the drafter's forwards; `grow`,
        what else the tree took; `verify`, the target's forward; `commit`, the cache; `accept`, all
        that is left, and what lies between two rounds. And the bytes of the drafter's state.
    """
    target, drafter, tree = speculator.target, speculator.drafter, speculator.tree
    own = None if speculator.graphs is None else RoundGraphs.on(ids.device)
    greedy = Sampling(None, LogitsProcessorList())
    request = Request(target, speculator.drafters, tree, greedy, rule=RULES["greedy"])
    decoding = Decoding(request, own)
    wanted = (rounds + _TOGETHER + _WARM_UP + 1) * (tree.max_depth + 1)
    decoding.prefill(ids, torch.ones_like(ids), wanted)
    watch = Stopwatch(ids.device)
    spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    owners = {"grow": (tree, ["grow"]), "verify": (target, ["verify"])}
    owners["commit"] = (target, ["commit"])
    if drafter is not None:
        owners["draft"] = (drafter, ["begin", "extend"])
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    together = _TOGETHER if own is not None and own.captures else 1
    with _watched(owners, spans, watch):
        for _ in range(_WARM_UP):
            decoding.round()
        for _ in range(0, rounds, together):
            before = spans["grow"]
            begun = watch.mark()
            for _ in range(together):
                decoding.round()
            whole = watch.between(begun, watch.mark()) / together
            took = {part: sum(watch.between(*span) for span in spans[part]) for part in
                    ("draft", "grow", "verify", "commit")}  # fmt: skip
            took["grow"] -= took["draft"]
            took |= {"round": whole, "accept": whole - sum(took.values())}
            found[spans["grow"] is before].append(took)
    counted = found[True] or found[False]  # by replays alone, where there are any
    parts = {part: statistics.median(took[part] for took in counted) for part in counted[0]}
    return parts, state_bytes(decoding.request.states)


@contextmanager
def _watched(
    owners: Mapping[str, tuple[Any, list[str]]],
    spans: dict[str, list[tuple[Any, Any]]],
    watch: Stopwatch,
) -> Iterator[None]:
    """Note when methods of single objects begin and end, by the part that they belong to.

    A round that begins forgets the last one's; a replayed one, which runs no Python, leaves them.
    """

    def watched(part: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if part == "grow":  # what a round does first
                spans.clear()
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


def state_bytes(state: Any) -> int:
    """Bytes of the distinct storages that a drafter's state reaches.

    >>> text = torch.zeros(4, 8)
    >>> state_bytes({"text": text, "views": [text[0], text[1]]})
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
