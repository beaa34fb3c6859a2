"""What a round of the decode loop costs on this machine: verifying, drafting, and the rest."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter, TokenTree

from ..graphs import captures_rounds, repeated
from ..speculator import Speculator
from ..stats import Stats
from ..target import Target
from ..trees.static import StaticTree
from .ranks import Tick, Written, decode_greedily
from .timing import Call, interleaved, medians, take_turns

_CALLS = 8  # turns that each forward gets to be timed
_BURST = 5  # timed calls in a turn
_RUNS = 5  # times each probe decodes
_WARM = 16  # new tokens that warm up what has no graphs to capture

SECONDS = 300.0
"""No timing goes on for longer, once everything has had a turn; slow targets get few turns."""

STEPS = 2 * _CALLS + _RUNS
"""How often `measure_costs` ticks."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds, medians, for one batch.

    Attributes:
        plain: a round of plain decoding, all of it.
        verify: t(n), the target's forward over n nodes, by n.
        begin: the drafter's `begin`.
        extend: the drafter's `extend`, by the nodes of the level; empty for independent heads.
        loop: what else a round costs: a + b · nodes + c · depth, fitted to rounds of real trees.
    """

    plain: float
    verify: dict[int, float]
    begin: float
    extend: dict[int, float]
    loop: tuple[float, float, float]

    def forwards(self, tree: StaticTree) -> float:
        """Verifying the tree and drafting it, level by level where the drafter does so."""
        cost = _between(self.verify, tree.nodes)
        if tree.nodes > 1:
            cost += self.begin
        if self.extend:
            inner = set(tree.parents[1:])
            for depth in range(1, tree.max_depth):
                level = sum(1 for node in inner if tree.depths[node] == depth)
                cost += _between(self.extend, level)
        return cost

    def round(self, tree: StaticTree) -> float:
        """A whole round with this tree."""
        if tree.nodes == 1:
            return self.plain
        fixed, node, level = self.loop
        rest = fixed + node * tree.nodes + level * tree.max_depth
        return self.forwards(tree) + max(rest, 0.0)


def measure_costs(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[Written],
    max_nodes: int,
    depth: int,
    tick: Tick = lambda: None,
) -> Costs:
    """Time the forwards and real rounds, in turns, at the texts' middle length.

    Args:
        texts: one for each row of the batch.
        depth: the deepest level that trees will have.
        tick: called after each of `STEPS` parts.
    """
    layers = drafter.config.feature_layers
    verify = verify_costs(target, layers, _context(texts), sizes(max_nodes), tick)
    begin, extend = _drafter_costs(drafter, texts, sizes(max_nodes), depth, tick)
    probes = _probes(max_nodes, depth)
    prompts = [text.tokens[: text.prompt] for text in texts]
    new_tokens = max(len(text.tokens) - text.prompt for text in texts)
    speculators = {str(tree): Speculator(target, drafter, tree=tree) for tree in probes}
    speculators |= {"plain": Speculator(target)}
    done = decode_times(speculators, [prompts] * _RUNS, new_tokens, tick, SECONDS)
    rounds = {name: 1e3 * statistics.median(each) for name, each in done.per_round.items()}
    costs = Costs(rounds["plain"], verify, begin, extend, (0.0, 0.0, 0.0))
    rest = [rounds[str(tree)] - costs.forwards(tree) for tree in probes]
    shape = [(1.0, tree.nodes, tree.max_depth) for tree in probes]
    fixed, node, level = np.linalg.lstsq(np.array(shape), np.array(rest), rcond=None)[0].tolist()
    return Costs(rounds["plain"], verify, begin, extend, (fixed, node, level))


def sizes(largest: int) -> list[int]:
    """The sizes to time or plan: 1, 2, 3, 4, 6, 8, 12, 16, … and the largest.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = {1, largest}
    for power in range(int(math.log2(largest)) + 1):
        found |= {2**power, 3 * 2**power}
    return sorted(size for size in found if size <= largest)


@dataclass
class Decoded:
    """Real decoding, by speculator.

    Attributes:
        per_round: seconds a round of the loop, for each batch.
        loops: rounds of the loop; rounds: active row-rounds; tokens: emitted in rounds; of all
            batches.
    """

    per_round: dict[str, list[float]]
    loops: Counter[str]
    rounds: Counter[str]
    tokens: Counter[str]


def decode_times(
    speculators: dict[str, Speculator],
    batches: Sequence[Sequence[Tensor]],
    new_tokens: int,
    tick: Tick = lambda: None,
    seconds: float = math.inf,
) -> Decoded:
    """Decode batches of prompts [P] greedily with every speculator in turn, once warmed up.

    Args:
        tick: called after each batch, and for those that are left out.
        seconds: after so many no further batch is begun; the first one always is.
    """
    for speculator in speculators.values():
        warm = new_tokens if speculator.graphs is not None else min(new_tokens, _WARM)
        decode_greedily(speculator, batches[0], warm)

    def decode(speculator: Speculator, prompts: Sequence[Tensor]) -> Stats:
        decode_greedily(speculator, prompts, new_tokens)
        return speculator.stats

    runs = {name: partial(decode, speculator) for name, speculator in speculators.items()}
    found: dict[str, list[Stats]] = take_turns(runs, batches, tick, seconds)
    return Decoded(
        {
            name: [stats.decode_seconds / max(len(stats.counts), 1) for stats in each]
            for name, each in found.items()
        },
        Counter({name: sum(len(stats.counts) for stats in each) for name, each in found.items()}),
        Counter({name: sum(stats.rounds for stats in each) for name, each in found.items()}),
        Counter({name: sum(stats.tokens for stats in each) for name, each in found.items()}),
    )


def _probes(max_nodes: int, depth: int) -> list[StaticTree]:
    """Small and large, shallow and deep: what the loop's own cost is fitted to."""
    rest = range(1, max_nodes - depth)
    trees = [
        StaticTree.chain(1),
        StaticTree.chain(min(depth, max_nodes - 1)),
        StaticTree([[rank] for rank in range(max_nodes - 1)]),
        StaticTree([[0] * depth, *([rank] for rank in rest)]),
    ]
    return list({tree.paths: tree for tree in trees if tree.nodes <= max_nodes}.values())


@torch.no_grad()
def verify_costs(
    model: PreTrainedModel,
    feature_layers: Sequence[int],
    context: Tensor,
    counts: Sequence[int],
    tick: Tick = lambda: None,
) -> dict[int, float]:
    """t(n): milliseconds of the target's forward over a tree of n nodes, medians, by n.

    Args:
        context: [B, L] int64, the tokens that are cached before the tree.
        tick: called after each of `_CALLS` parts.
    """
    target = Target(model, tuple(feature_layers))
    batch, length = context.shape
    target.prefill(context, [length] * batch, length + max(counts))
    lengths = torch.full_like(context[:, 0], length)
    calls: dict[int, Call] = {}
    captured = captures_rounds(model)
    even = not captured  # a captured round takes lengths from the device
    for count in counts:
        topology, proposal_row = StaticTree([[r] for r in range(count - 1)]).shape(
            batch, context.device
        )
        tokens = context[:, :1].expand(-1, count).contiguous()
        tree = TokenTree(tokens, topology, None, proposal_row)
        calls[count] = lambda tree=tree: target.verify(tree, lengths, length, even)
    calls = repeated(context.device, calls) if captured else calls
    times = interleaved(calls, context.device, _CALLS, _BURST, tick, SECONDS)
    if target.tap is not None:
        target.tap.close()
    return medians(times)


@torch.no_grad()
def _drafter_costs(
    drafter: Drafter, texts: Sequence[Written], counts: Sequence[int], depth: int, tick: Tick
) -> tuple[float, dict[int, float]]:
    context = _context(texts)  # [B, L]
    features = _cut([text.features for text in texts], context.shape[1])  # [B, L, F]
    batch, length = context.shape
    state = drafter.start(batch, length + max(counts) + depth + 1)
    count = torch.full_like(context[:, 0], length)
    drafter.prefill(state, features, context, count)
    # A round hands over as many columns as a path can be long, of which few are true.
    some = [
        values[:, -1:].expand(-1, depth + 1, *values.shape[2:]) for values in (features, context)
    ]
    # As to rows that have ended: the work is the same, and the text does not grow meanwhile.
    none = torch.zeros_like(count)

    def begin() -> None:
        drafter.reserve(state, length, depth + 1 + max(counts))
        drafter.begin(state, some[0], some[1], none)

    def extend(width: int) -> Callable[[], None]:
        nodes = context[:, -1:].expand(-1, width)
        parent = torch.full_like(nodes, -1)

        def both() -> None:
            begin()
            drafter.extend(state, nodes, parent)

        return both

    levels = [] if drafter.independent or depth < 2 else list(counts)
    work = {0: begin, **{width: extend(width) for width in levels}}
    calls = repeated(context.device, work) if captures_rounds(drafter.target) else work
    times = medians(interleaved(calls, context.device, _CALLS, _BURST, tick, SECONDS))
    return times[0], {width: max(times[width] - times[0], 0.0) for width in levels}


def _context(texts: Sequence[Written]) -> Tensor:
    """[B, L]: each text up to the middle of what was written, all cut to one length."""
    middle = sorted((text.prompt + len(text.tokens)) // 2 for text in texts)
    return _cut([text.tokens for text in texts], middle[len(middle) // 2])


def _cut(rows: Sequence[Tensor], length: int) -> Tensor:
    """[B, L, …]: rows cut to `length`, or repeated up to it."""
    reach = [row.repeat(-(-length // len(row)), *[1] * (row.dim() - 1)) for row in rows]
    return torch.stack([row[:length] for row in reach])


def _between(costs: dict[int, float], count: int) -> float:
    return float(np.interp(count, list(costs), list(costs.values())))
