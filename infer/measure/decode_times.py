"""Times rounds of real decoding, the speculators in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..speculator import Speculator
from ..stats import Stats
from .greedy_text import Tick, decode_greedily
from .timing import take_turns

_WARM = 16  # new tokens that warm up a speculator without graphs to capture


@dataclass
class DecodeTimes:
    """Real decoding, by the speculator's name.

    Attributes:
        per_round: seconds a round of the loop, for each batch.
        loops: rounds of the loop; rounds: active row-rounds; tokens: emitted in rounds; of all
            batches.
    """

    per_round: dict[str, list[float]] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


def decode_times(
    speculators: dict[str, Speculator],
    batches: Sequence[Sequence[Tensor]],
    new_tokens: int,
    tick: Tick = lambda: None,
    seconds: float = math.inf,
) -> DecodeTimes:
    """Decode batches of prompts [P] greedily with every speculator in turn, after a warm-up.

    Args:
        tick: called after each batch, also for those that are left out.
        seconds: no batch but the first one begins after this time.
    """
    for speculator in speculators.values():
        warm = new_tokens if speculator.graphs is not None else min(new_tokens, _WARM)
        decode_greedily(speculator, batches[0], warm)

    def decode(speculator: Speculator, prompts: Sequence[Tensor]) -> Stats:
        decode_greedily(speculator, prompts, new_tokens)
        return speculator.stats

    runs = {name: partial(decode, speculator) for name, speculator in speculators.items()}
    found = DecodeTimes()
    for name, each in take_turns(runs, batches, tick, seconds).items():
        found.per_round[name] = [s.decode_seconds / max(len(s.counts), 1) for s in each]
        found.loops[name] = sum(len(stats.counts) for stats in each)
        found.rounds[name] = sum(stats.rounds for stats in each)
        found.tokens[name] = sum(stats.tokens for stats in each)
    return found
