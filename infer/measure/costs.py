"""What a round of the decode loop costs on this machine: verifying, drafting, and the rest."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter

from ..speculator import Speculator
from ..stats import Stats
from ..trees.static import StaticTree
from .forward_costs import SECONDS, TURNS, context_of, draft_costs, output_cost, verify_costs
from .own_text import Tick, Written, decode_texts
from .timing import take_turns

_RUNS = 5  # times each probe decodes
_WARM = 16  # new tokens that warm up a speculator without graphs to capture

STEPS = 2 * TURNS + _RUNS
"""How often `measure_costs` ticks."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds, medians, for one batch."""

    plain: float  # a round of plain decoding, all of it
    verify: dict[int, float]  # t(n), the target's forward over n nodes, by n
    begin: float  # the drafter's
    extend: dict[int, float]  # the drafter's, by a level's nodes; empty for independent heads
    loop: tuple[float, float, float]  # what else: a + b · nodes + c · depth, fitted to real rounds
    output: float = 0.0  # of `begin`, see `output_cost`

    def forwards(self, tree: StaticTree) -> float:
        """Verifying the tree and drafting it, level by level where the drafter does so."""
        cost = _between(self.verify, tree.nodes) + (self.begin if tree.nodes > 1 else 0.0)
        if self.extend:
            levels = Counter(tree.depths[node] for node in {*tree.parents[1:]} - {0})
            cost += sum(_between(self.extend, nodes) for nodes in levels.values())
        return cost

    def dearer(self, nodes: int) -> bool:
        """Whether verifying so many nodes costs more than some larger number of them.

        On a CPU it may: products of two rows are as slow as two of one, those of eight are not.
        """
        larger = [cost for size, cost in self.verify.items() if size > nodes]
        return bool(larger) and _between(self.verify, nodes) > min(larger)

    def round(self, tree: StaticTree) -> float:
        """A whole round with this tree."""
        if tree.nodes == 1:
            return self.plain
        a, b, c = self.loop
        return self.forwards(tree) + max(a + b * tree.nodes + c * tree.max_depth, 0.0)


def measure_costs(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[Written],
    max_nodes: int,
    depth: int,
    tick: Tick = lambda: None,
    compile: bool | str = False,
    temperature: float = 0.0,
) -> Costs:
    """Time forwards and real rounds, each kind in turn, at the texts' middle length.

    Args:
        texts: one for each row of the batch.
        depth: the deepest level that trees will have.
        tick: called after each of `STEPS` parts.
        compile: how forwards run, see `Speculator`.
        temperature: that the rounds sample at, 0 for greedily.
    """
    layers = drafter.config.feature_layers
    verify = verify_costs(target, layers, context_of(texts), sizes(max_nodes), tick, compile)
    probes = _probes(max_nodes, depth)
    speculators: dict[str, Speculator] = {
        str(tree): Speculator(target, drafter, tree=tree, compile=compile) for tree in probes
    }
    # As rounds run it: on a CPU a packed copy, where forwards are packed.
    runs = next(iter(speculators.values())).decoding_drafters.drafters[0]
    begin, extend = draft_costs(runs, texts, sizes(max_nodes), depth, tick)
    output = output_cost(runs, len(texts))
    prompts = [text.tokens[: text.prompt] for text in texts]
    new_tokens = max(len(text.tokens) - text.prompt for text in texts)
    speculators |= {"plain": Speculator(target, compile=compile)}
    done = decode_times(speculators, [prompts] * _RUNS, new_tokens, tick, SECONDS, temperature)
    rounds = {name: 1e3 * statistics.median(each) for name, each in done.per_round.items()}
    costs = Costs(rounds["plain"], verify, begin, extend, (0.0, 0.0, 0.0), output)
    return replace(costs, loop=_loop_cost(costs, {tree: rounds[str(tree)] for tree in probes}))


def _loop_cost(costs: Costs, rounds: dict[StaticTree, float]) -> tuple[float, float, float]:
    """What rounds of these milliseconds cost beside their forwards, see `Costs.loop`.

    Of a round's share that is not explained, the sum of squares is least: times are off in
    proportion, and in milliseconds the largest tree alone would decide what the smallest costs.
    """
    shape = [(1.0 / ms, tree.nodes / ms, tree.max_depth / ms) for tree, ms in rounds.items()]
    rest = [1.0 - costs.forwards(tree) / ms for tree, ms in rounds.items()]
    a, b, c = np.linalg.lstsq(shape, rest, rcond=None)[0].tolist()
    return a, b, c


@dataclass
class DecodeTimes:
    """Real decoding, by the speculator's name; counts are of all batches."""

    per_round: dict[str, list[float]] = field(default_factory=dict)  # seconds, for each batch
    loops: dict[str, int] = field(default_factory=dict)  # rounds of the loop
    rounds: dict[str, int] = field(default_factory=dict)  # active row-rounds
    tokens: dict[str, int] = field(default_factory=dict)  # emitted in rounds


def decode_times(
    speculators: dict[str, Speculator],
    batches: Sequence[Sequence[Tensor]],
    new_tokens: int,
    tick: Tick = lambda: None,
    seconds: float = math.inf,
    temperature: float = 0.0,
) -> DecodeTimes:
    """Decode batches of prompts [P] with every speculator in turn, after a warm-up.

    Args:
        speculators: from here on their drafters remember nothing: the prompts come again, and what
            was written after them would be drafted.
        tick: called after each batch, also for those that are left out.
        seconds: no batch but the first one begins after this time.
        temperature: 0 is greedily.
    """
    for speculator in speculators.values():
        speculator.remembers = False
        warm = new_tokens if speculator.graphs is not None else min(new_tokens, _WARM)
        decode_texts(speculator, batches[0], warm, temperature)

    def decode(speculator: Speculator, prompts: Sequence[Tensor]) -> Stats:
        decode_texts(speculator, prompts, new_tokens, temperature)
        return speculator.stats

    runs = {name: partial(decode, speculator) for name, speculator in speculators.items()}
    found = DecodeTimes()
    for name, each in take_turns(runs, batches, tick, seconds).items():
        found.per_round[name] = [s.decode_seconds / max(len(s.counts), 1) for s in each]
        found.loops[name] = sum(len(stats.counts) for stats in each)
        found.rounds[name] = sum(stats.rounds for stats in each)
        found.tokens[name] = sum(stats.tokens for stats in each)
    return found


def sizes(largest: int) -> list[int]:
    """The sizes to time or plan: 1, 2, 3, 4, 6, 8, 12, 16, … and the largest.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = {1, largest}
    for power in range(int(math.log2(largest)) + 1):
        found |= {2**power, 3 * 2**power}
    return sorted(size for size in found if size <= largest)


def _probes(max_nodes: int, depth: int) -> list[StaticTree]:
    """Small and large, shallow and deep trees: what the loop's own cost is fitted to."""
    trees = [
        StaticTree.chain(1),
        StaticTree.chain(min(depth, max_nodes - 1)),
        StaticTree([[rank] for rank in range(max_nodes - 1)]),
        StaticTree([[0] * depth, *([rank] for rank in range(1, max_nodes - depth))]),
    ]
    return list({tree.paths: tree for tree in trees if tree.nodes <= max_nodes}.values())


def _between(costs: dict[int, float], count: int) -> float:
    """The cost at `count`, interpolated between those measured."""
    return float(np.interp(count, list(costs), list(costs.values())))
