"""The trees that a plan chooses among, and what each is expected to gain.

Cost model (Sequoia, arXiv 2402.12374): speedup = G / (t(n) + d · c), with everything measured. G,
the tokens per round, comes from replayed ranks (see `ranks`); t(n), c and the loop's own cost from
timed forwards and timed rounds (see `costs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..trees.optimal import OptimalTrees
from ..trees.static import StaticTree
from .costs import Costs, sizes
from .ranks import RANKS, Replayed, acceptance, best_tree, replay

SMALL = 64
"""Nodes of the trees that a plan considers; larger ones reach deeper, and to less likely ranks."""

_FOLDS = 4
_CARTESIAN = (
    (2, 1), (3, 1), (2, 2), (2, 1, 1), (3, 2, 1), (2, 2, 2), (4, 2, 1, 1), (3, 2, 1, 1, 1),
    (4, 3, 2, 1), (6, 3, 2),
)  # fmt: skip
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # limits tried where every level costs a forward


@dataclass(frozen=True)
class Candidate:
    """One tree that was considered."""

    name: str  # the policy and its size
    nodes: int  # the root counted
    depth: int
    tau: float  # expected tokens per round, from replayed ranks
    round_ms: float  # expected milliseconds of a round
    speedup: float  # expected, against plain decoding in the same runtime
    tree: list[list[int]]  # its rank paths
    measured_tau: float | None = None  # of real decoding; None where it was not measured
    measured_speedup: float | None = None

    @property
    def best_known(self) -> float:
        """The measured speedup where there is one, else the expected one."""
        return self.speedup if self.measured_speedup is None else self.measured_speedup


@dataclass(frozen=True)
class ReplayedTree:
    """A tree by its rank paths, and the rounds it needed on texts that it was not fitted to."""

    name: str
    paths: list[list[int]]
    done: Replayed


def rank_trees(
    ranks: Sequence[Tensor], costs: Costs, independent: bool, max_nodes: int, batch_size: int = 1
) -> list[Candidate]:
    """Every tree that is considered, by its expected speedup, the best first.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`. They may come from another model than the
            costs; the result then says what such acceptance would be worth there.
        independent: see `Drafter`.
    """
    trees = replayed_trees(ranks, max_nodes, independent)
    return expected_speedups(trees, ranks, costs, batch_size)


def reach(max_nodes: int) -> tuple[int, int]:
    """The depth of trees of at most `max_nodes` nodes, and the ranks that they use."""
    return (16, RANKS) if max_nodes <= SMALL else (_DEPTHS[-1], 32)


def replayed_trees(
    ranks: Sequence[Tensor], max_nodes: int, independent: bool
) -> Iterator[ReplayedTree]:
    """Every tree that is considered, replayed.

    A tree that is fitted to ranks is replayed on texts that it was not fitted to, by
    cross-validation; its paths are those fitted to all texts.
    """
    depth = ranks[0].shape[1]
    fixed = {f"chain:{n}": (1,) * n for n in range(1, depth + 1)}
    fixed |= {f"cartesian:{','.join(map(str, widths))}": widths for widths in _CARTESIAN}
    for name, widths in fixed.items():
        tree = StaticTree.cartesian(widths)
        if len(widths) <= depth and tree.nodes <= max_nodes:
            paths = [list(path) for path in tree.paths]
            yield ReplayedTree(name, paths, replay(ranks, paths))

    folds = min(_FOLDS, len(ranks))
    rest = [[r for i, r in enumerate(ranks) if i % folds != f] for f in range(folds)]
    rest = rest if folds > 1 else [list(ranks)]  # a single text is all there is to fit to
    fitted = [_fitted_trees(part, max_nodes, independent) for part in rest]
    for name, paths in _fitted_trees(ranks, max_nodes, independent).items():
        tokens, rounds = [0] * len(ranks), [0] * len(ranks)
        for fold, trees in enumerate(fitted):
            done = replay(ranks[fold::folds], trees[name])
            tokens[fold::folds], rounds[fold::folds] = done.tokens, done.rounds
        yield ReplayedTree(name, paths, Replayed(tokens, rounds))


def _fitted_trees(
    ranks: Sequence[Tensor], max_nodes: int, independent: bool
) -> dict[str, list[list[int]]]:
    """Trees fitted to these ranks, by name: sparse measured ones and optimal static ones."""
    depth, width = ranks[0].shape[1], reach(max_nodes)[1]
    accept = acceptance(ranks, width)  # [K, W]
    counts = sizes(max_nodes)[2:] or [max_nodes]
    trees = {f"sparse:{count}": best_tree(ranks, count, width=width) for count in counts}
    # With independent heads a shallow tree is no cheaper.
    limits = [depth] if independent else [d for d in _DEPTHS if d < depth] + [depth]
    for limit in limits:
        best = OptimalTrees(accept, max_nodes, limit)
        suffix = f" depth {limit}" if limit < depth else ""
        trees |= {f"optimal:{count}{suffix}": best.paths(count) for count in counts}
    return trees


def expected_speedups(
    trees: Iterator[ReplayedTree], ranks: Sequence[Tensor], costs: Costs, batch_size: int
) -> list[Candidate]:
    """The trees as candidates, the fastest first, equal trees once.

    Those whose verification costs more than that of more nodes are left out, where others are left.
    """
    plain = _loops([len(each) for each in ranks], batch_size) * costs.plain
    found: dict[tuple[tuple[int, ...], ...], Candidate] = {}
    for each in trees:
        tree = StaticTree(each.paths)
        if tree.nodes == 1:  # no rank was ever right
            continue
        round_ms = costs.round(tree)
        speedup = plain / (_loops(each.done.rounds, batch_size) * round_ms)
        shape = each.name, tree.nodes, tree.max_depth
        candidate = Candidate(*shape, each.done.tau, round_ms, speedup, each.paths)
        found.setdefault(tree.paths, candidate)
    cheap = [each for each in found.values() if not costs.dearer(each.nodes)]
    return sorted(cheap or found.values(), key=lambda candidate: -candidate.speedup)


def _loops(rounds: Sequence[int], batch_size: int) -> int:
    """Rounds of the loop for all batches: each runs until its last row has ended."""
    starts = range(0, len(rounds), batch_size)
    return sum(max(rounds[start : start + batch_size]) for start in starts)
