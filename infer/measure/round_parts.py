"""Where a round's time goes: the target's forwards, the drafter's, and the loop around them.

The loop's cost is a round less its forwards replayed alone, with the arguments that they had. What
a drafter does when it observes counts as the loop's: replays would need the logits of every round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from headstart.heads.core import CACHE, attending, in_parts, offloaded, run_streamed

from ..speculator import Speculator
from .timing import Stopwatch

REPLAYED_PROMPTS = 8
"""Prompts whose forwards are replayed to find the parts; more change a median little."""


@dataclass(frozen=True)
class RoundParts:
    """Milliseconds a round: the target verifies, the drafter drafts, the loop does the rest."""

    verify: float
    draft: float
    loop: float

    @classmethod
    def middle(cls, each: list[RoundParts]) -> dict[str, float]:
        """The median of each part over prompts; empty where none was measured."""
        names = ("verify", "draft", "loop")
        return {name: median(getattr(one, name) for one in each) for name in names} if each else {}


def round_parts(
    speculator: Speculator, decode: Callable[[], object], decode_ms: float, repeats: int
) -> RoundParts | None:
    """The parts of the rounds that a speculator has just decoded in `decode_ms`.

    Args:
        decode: decodes the same again.
        repeats: how often the forwards are replayed; the median counts.

    Returns:
        None where rounds are captured whole, or attend as trees, where processes hold parts of the
        target, and where there was no round.
    """
    rounds = speculator.stats.rounds
    captured = speculator.graphs is not None or speculator.target.windows.tree
    if captured or in_parts(speculator.model) or not rounds:
        return None
    replayed = [_replay(speculator, decode) for _ in range(repeats)]
    verify, draft = (median(each) / rounds for each in zip(*replayed, strict=True))
    return RoundParts(verify, draft, decode_ms / rounds - verify - draft)


def _replay(speculator: Speculator, decode: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds that the forwards of target and drafter take alone, the prefill's left out."""
    target, drafters = speculator.target, speculator.decoding_drafters.drafters
    calls: list[tuple[Callable, tuple, dict, Any]] = []  # and the tree that recurrent layers ran

    def recorded(function: Callable) -> Callable:
        @functools.wraps(function)  # `generate` asks some models' forwards what they take
        def record(*args: Any, **kwargs: Any) -> Any:
            # A count of 0, in place of `begin`'s own: the drafter's cache does not grow in replays.
            still = [torch.zeros_like(args[3])] if function.__name__ == "begin" else args[3:]
            states = getattr(kwargs.get(CACHE), "recurrent", None)
            calls.append((function, (*args[:3], *still), kwargs, states and states.tree))
            return function(*args, **kwargs)

        return record

    patches: list[tuple[Any, str]] = [(target.runner, "forward")]
    patches += [(drafter, name) for drafter in drafters for name in ("begin", "extend")]
    own = [vars(owner).get(name) for owner, name in patches]  # such as a hook that streams weights
    for owner, name in patches:
        object.__setattr__(owner, name, recorded(getattr(owner, name)))
    try:
        decode()
    finally:
        for (owner, name), before in zip(patches, own, strict=True):
            if before is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)
    verify, draft, watch = 0.0, 0.0, Stopwatch(target.device)

    def contexts() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(target.fused or nullcontext())
        stack.enter_context(attending(target.runner, target.windows))
        return stack

    streams = offloaded(target.runner)
    with torch.no_grad():
        for function, args, kwargs, tree in calls[1:]:
            call = functools.partial(function, *args, **kwargs)
            if (slab := kwargs.get(CACHE)) is not None:
                root, nodes = int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]
                masks = kwargs.get("attention_mask")  # a lone node has none
                mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
                live = root + 1 if mask is None else mask.shape[3]
                slab.set_slots(range(root, root + nodes), live, root if mask is None else 0)
                if slab.recurrent is not None:
                    slab.recurrent.run_tree(tree)
                if streams:
                    call = functools.partial(run_streamed, target.runner, call)
            with contexts() if slab is not None else nullcontext():
                took = watch.time(call)
            verify, draft = (verify, draft + took) if slab is None else (verify + took, draft)
    return verify, draft
