"""The static tree with the most expected tokens, by Sequoia's dynamic programme.

Source: Chen et al. 2024, "Sequoia: Scalable and Robust Speculative Decoding" (arXiv 2402.12374). It
assumes that a child is accepted with a probability that depends on its rank alone (here, where
wanted, on its depth too), so a node counts with the product along its path, and the root with 1.
"""

import numpy as np
from numpy.typing import ArrayLike

_NONE = -np.inf  # the value of a tree that cannot be


class OptimalTrees:
    """The best tree for every number of nodes up to `nodes`, the root counted.

    Args:
        accept: p, the probability that the child of rank b is the accepted one: [W], or [D, W]
            where it differs by depth, whose last row then holds for all deeper levels too. Any
            order: a child needs its better siblings in the tree even where they are less likely.
        nodes: N, at least 1.
        depth: the deepest level allowed; None for no limit.

    Raises:
        ValueError: no rank, an entry outside 0 … 1, fewer than one node or a negative depth.

    Attributes:
        expected: [N + 1], F of the best tree of at most n nodes; entry 0 is 0.

    The programme: T[n, b], the best tree of n nodes whose root has b children, is the largest over
    m < n of T[n - m, b - 1] + p_b · (the best tree of m nodes, one level further down).

    >>> best = OptimalTrees([0.6, 0.3], nodes=4)
    >>> best.paths(4), round(float(best.expected[4]), 3)
    ([[0], [1], [0, 0]], 2.26)
    >>> best.paths(3), OptimalTrees([0.6, 0.3], nodes=3, depth=1).paths(3)
    ([[0], [0, 0]], [[0], [1]])
    """

    def __init__(self, accept: ArrayLike, nodes: int, depth: int | None = None):
        table = np.atleast_2d(np.asarray(accept, dtype=float))  # [D, W]
        inside = table.ndim == 2 and table.size and bool(((table >= 0) & (table <= 1)).all())
        if not inside or nodes < 1 or (depth is not None and depth < 0):
            raise ValueError(
                f"found acceptance of shape {table.shape}, {nodes} nodes and depth {depth}; "
                "expected probabilities [W] or [D, W], at least 1 node and no negative depth."
            )
        limit = nodes - 1 if depth is None else min(depth, nodes - 1)
        # Beyond its last row the table repeats itself: without a limit one level stands for all.
        self._endless = depth is None or depth >= nodes - 1
        levels = min(limit, len(table)) if self._endless else limit
        self._levels: list[tuple[np.ndarray, np.ndarray]] = []  # of the roots at depth 0, 1, …
        below = np.where(np.arange(nodes + 1) > 0, 1.0, _NONE)  # [N+1], the leaves' level
        for level in reversed(range(levels)):
            row = table[min(level, len(table) - 1)][: nodes - 1]  # [W]
            last = self._endless and level == levels - 1
            below, width, share = _recursive(row, nodes) if last else _level(row, below)
            self._levels.insert(0, (width, share))
        self.expected = np.where(np.arange(nodes + 1) > 0, below, 0.0)

    def paths(self, nodes: int) -> list[list[int]]:
        """Rank paths of the best tree of at most so many nodes, by depth, for `StaticTree`."""
        found: list[list[int]] = []
        queue: list[tuple[list[int], int]] = [([], nodes)]
        while queue:
            path, budget = queue.pop()
            if path:
                found.append(path)
            if not self._levels or (len(path) >= len(self._levels) and not self._endless):
                continue
            width, share = self._levels[min(len(path), len(self._levels) - 1)]
            for rank in reversed(range(width[budget])):
                size = int(share[rank, budget])
                queue.append(([*path, rank], size))
                budget -= size
        return sorted(found, key=lambda path: (len(path), path))


def _level(accept: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One level on top of subtrees that are worth `below` [N + 1].

    The best value of n nodes [N + 1], how many children its root has [N + 1], and how many nodes
    the b-th of b children and its subtree get [W, N + 1].
    """
    size = len(below)
    total = np.where(np.arange(size) > 0, 1.0, _NONE)  # T[n, 0]: n nodes may be fewer
    best, width = total.copy(), np.zeros(size, dtype=np.int64)
    share = np.zeros((len(accept), size), dtype=np.int32)
    falling = bool((np.diff(accept) <= 0).all())
    for rank, chance in enumerate(accept):
        # Where better children come first, some best tree gives them the larger subtrees.
        most = (size - 2) // (rank + 1) if falling else size - 2
        worth = chance * below[1 : most + 1]  # [m]
        padded = np.concatenate([np.full(most, _NONE), total[:-1]])  # T[n - m, b] for n from 1
        windows = np.lib.stride_tricks.sliding_window_view(padded, most)[1:, ::-1]  # [n, m]
        sums = windows[: size - 1] + worth
        pick = sums.argmax(1)
        total = np.concatenate([[_NONE], sums[np.arange(len(pick)), pick]])
        share[rank, 1:] = pick + 1
        better = total > best
        best, width = np.where(better, total, best), np.where(better, rank + 1, width)
    return best, width, share


def _recursive(accept: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same where the subtrees are such trees themselves: without a limit of depth."""
    ranks = len(accept)
    total = np.full((ranks + 1, nodes + 1), _NONE)  # [b, n]
    total[0, 1:] = 1.0
    best = np.where(np.arange(nodes + 1) == 1, 1.0, _NONE)
    width = np.zeros(nodes + 1, dtype=np.int64)
    share = np.zeros((ranks, nodes + 1), dtype=np.int32)
    for size in range(2, nodes + 1):
        sums = total[:-1, size - 1 : 0 : -1] + accept[:, None] * best[1:size]  # [W, m]
        pick = sums.argmax(1)
        total[1:, size] = sums[np.arange(ranks), pick]
        share[:, size] = pick + 1
        width[size] = total[:, size].argmax()
        best[size] = total[width[size], size]
    return best, width, share
