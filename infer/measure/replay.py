"""What a tree would have accepted, from recorded ranks; and the tree that would accept most."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .ranks import RANKS


@dataclass(frozen=True)
class Replayed:
    """Rounds that a tree would have needed.

    Attributes:
        tokens: emitted in rounds, for each text.
        rounds: rounds, for each text.
    """

    tokens: list[int]
    rounds: list[int]

    @property
    def tau(self) -> float:
        """Tokens per round; 1 where no text needed a round."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else 1.0


def replay(ranks: Sequence[Tensor], paths: Sequence[Sequence[int]]) -> Replayed:
    """Count the rounds that the decode loop would run with a tree of the drafter's best tokens.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.
        paths: the tree's rank paths, every one with its prefixes.

    >>> import torch
    >>> replay([torch.tensor([[0, 1], [0, 0], [0, 9]])], [[0], [0, 0]])
    Replayed(tokens=[3], rounds=[2])
    """
    tree = {tuple(path) for path in paths}
    tokens, rounds = [], []
    for each in ranks:
        row = [tuple(position) for position in each.tolist()]
        tokens.append(len(row))
        rounds.append(sum(1 for _ in _rounds(row, tree)))
    return Replayed(tokens, rounds)


def _rounds(row: list[tuple[int, ...]], tree: set[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Where each round of a text starts, and how many of the tree's nodes it accepts."""
    at = 0
    while at < len(row):
        depth = 0
        while depth < len(row[at]) and row[at][: depth + 1] in tree:
            depth += 1
        yield at, depth
        at += depth + 1


def best_tree(
    ranks: Sequence[Tensor], nodes: int, passes: int = 4, width: int = RANKS
) -> list[list[int]]:
    """The static tree of `nodes` nodes, the root counted, that accepts most (Medusa's sparse tree).

    A position accepts the node of rank path (r1 … rd) when the true tokens have exactly those
    ranks. The tokens that a tree accepts are therefore a sum over its nodes of how often each path
    occurs, and the most frequent paths make the best tree; a path is never more frequent than its
    prefix. (Medusa multiplies the heads' accuracies instead, as if the heads erred independently.)
    Only positions at which a round starts count, and these depend on the tree. So the search
    starts from the best tree for all positions, repeats with the positions at which the previous
    tree's rounds start, and keeps the best tree.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.
        passes: how often the search repeats.
        width: ranks that a node may have.

    Returns:
        Rank paths, most frequent first.

    >>> import torch
    >>> best_tree([torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0]])], nodes=3, passes=1)
    [[0], [0, 0]]
    """
    rows = [[tuple(position) for position in row.tolist()] for row in ranks]
    starts = [position for row in rows for position in row]
    best: tuple[float, list[list[int]]] = (0.0, [])
    for _ in range(passes):
        counts: Counter[tuple[int, ...]] = Counter()
        for position in starts:
            likely = itertools.takewhile(lambda rank: rank < width, position)
            counts.update(itertools.accumulate((rank,) for rank in likely))
        # Shorter first among equals, so that every path comes after its prefixes.
        order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        paths = order[: nodes - 1]
        walked = [(row[at], depth) for row in rows for at, depth in _rounds(row, set(paths))]
        starts = [position for position, _ in walked]
        emitted = sum(depth + 1 for _, depth in walked)
        if starts and emitted / len(starts) > best[0]:
            best = emitted / len(starts), [list(path) for path in paths]
    return best[1]
