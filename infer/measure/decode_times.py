"""Times rounds of real decoding, the speculators in turn."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..speculator import Speculator
from .greedy_text import Tick, decode_greedily

_WARM = 16  # new tokens that warm up a speculator without graphs to capture


@dataclass
class DecodeTimes:
    """Real decoding, by the speculator's name.

    Attributes:
        per_round: seconds a round of the loop, for each batch.
        loops: rounds of the loop; rounds: active row-rounds; tokens: emitted in rounds; of all
            batches.
    """

    per_round: dict[str, list[float]]
    loops: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


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
    found = DecodeTimes({name: [] for name in speculators})
    end = time.perf_counter() + seconds
    for speculator in speculators.values():
        warm = new_tokens if speculator.graphs is not None else min(new_tokens, _WARM)
        decode_greedily(speculator, batches[0], warm)
    for number, prompts in enumerate(batches):
        late = number > 0 and time.perf_counter() > end
        for name, speculator in () if late else speculators.items():
            decode_greedily(speculator, prompts, new_tokens)
            stats = speculator.stats
            loops = len(stats.counts)
            found.per_round[name].append(stats.decode_seconds / max(loops, 1))
            found.loops[name] += loops
            found.rounds[name] += stats.rounds
            found.tokens[name] += stats.tokens
        tick()
    return found
