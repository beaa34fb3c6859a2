"""What a round of the decode loop costs beside its forwards."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.group import members

from ..speculator import Speculator
from .baselines import TimedDecode
from .timing import Stopwatch


def loop_overhead(
    speculator: Speculator, decode: TimedDecode, prompt: Tensor, decode_ms: float, repeats: int
) -> float:
    """Milliseconds a round of a prompt that was just decoded, less its forwards replayed alone.

    Args:
        decode: decodes with this speculator; prompt: [1, P]; decode_ms: what that took.

    Returns:
        NaN where rounds are captured whole, or attend as trees, and where there was none.
    """
    rounds = speculator.stats.rounds
    if speculator.graphs is not None or speculator.target.windows.tree or not rounds:
        return math.nan
    again = functools.partial(decode, prompt)
    replayed = statistics.median(_replay(speculator, again) for _ in range(repeats))
    return (decode_ms - replayed) / rounds


def _replay(speculator: Speculator, decode: Callable[[], object]) -> float:
    """Milliseconds that the forwards of one decoded prompt take alone, target and drafter.

    Every call is recorded while decoding and then repeated with nothing in between; the prefill's
    are left out.
    """
    target, drafters = speculator.target, members(speculator.drafter)
    calls: list[tuple[Callable, tuple, dict]] = []

    def recorded(function: Callable) -> Callable:
        def record(*args, **kwargs):
            # A count of 0, in place of `begin`'s own: the drafter's cache does not grow in replays.
            still = [torch.zeros_like(args[3])] if function.__name__ == "begin" else args[3:]
            calls.append((function, (*args[:3], *still), kwargs))
            return function(*args, **kwargs)

        return record

    patches = [(target.model, "forward")]
    patches += [(drafter, name) for drafter in drafters for name in ("begin", "extend")]
    for owner, name in patches:
        object.__setattr__(owner, name, recorded(getattr(owner, name)))
    try:
        decode()
    finally:
        for owner, name in patches:
            object.__delattr__(owner, name)
    milliseconds, watch = 0.0, Stopwatch(target.device)
    with torch.no_grad():
        for function, args, kwargs in calls[1:]:
            if (slab := kwargs.get("past_key_values")) is not None:
                root, nodes = int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]
                masks = kwargs["attention_mask"]
                mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
                live = root + 1 if mask is None else mask.shape[3]
                slab.set_slots(range(root, root + nodes), live, root if mask is None else 0)
            milliseconds += watch.time(functools.partial(function, *args, **kwargs))
    return milliseconds
