"""The dynamic programme against every tree there is, against greed, and against the clock."""

import heapq
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import ArrayLike

from headstart.infer import StaticTree
from headstart.infer.trees.optimal import OptimalTrees

Tree = tuple["Tree", ...]
POWER_LAW = 0.6 * np.arange(1, 512.0) ** -1.5


@cache
def trees(nodes: int) -> tuple[Tree, ...]:
    """All ordered trees of so many nodes: the Catalan numbers 1, 1, 2, 5, 14, …"""
    return tuple(tuple(forest) for forest in forests(nodes - 1))


@cache
def forests(nodes: int) -> tuple[tuple[Tree, ...], ...]:
    if nodes == 0:
        return ((),)
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in trees(size)
        for rest in forests(nodes - size)
    )


def deep(tree: Tree) -> int:
    return 1 + max(map(deep, tree)) if tree else 0


class Value:
    """F of a tree for many acceptance tables at once: tables [S, D, W] -> [S]."""

    def __init__(self, tables: np.ndarray):
        self.tables, self.known = tables, {}

    def __call__(self, tree: Tree, level: int = 0) -> np.ndarray:
        key = (tree, min(level, self.tables.shape[1] - 1))
        if key not in self.known:
            each = [self.tables[:, key[1], b] * self(c, level + 1) for b, c in enumerate(tree)]
            self.known[key] = 1 + sum(each, np.zeros(len(self.tables)))
        return self.known[key]

    def best(self, nodes: int, depth: int = 99) -> np.ndarray:
        """The best of all trees of at most so many nodes."""
        within = [t for n in range(1, nodes + 1) for t in trees(n) if deep(t) <= depth]
        return np.max([self(tree) for tree in within], axis=0)


def expected_tokens(accept: ArrayLike, paths: Sequence[Sequence[int]]) -> float:
    """F of the tree with these rank paths and their prefixes; ranks beyond the table count 0."""
    table = np.atleast_2d(np.asarray(accept, dtype=float))  # [D, W]
    deepest, width = table.shape
    closed = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    return 1.0 + sum(
        float(np.prod([table[min(d, deepest - 1), rank] for d, rank in enumerate(path)]))
        for path in closed
        if max(path) < width
    )


def vectors(kind: str, count: int = 100) -> np.ndarray:
    """Acceptance vectors [S, 9] whose entries sum to less than 1."""
    generator = np.random.default_rng(7)
    drawn = generator.dirichlet(np.full(10, 0.5), size=count)[:, :9]
    return -np.sort(-drawn, axis=1) if kind == "falling" else drawn


def test_the_trees_are_all_there() -> None:
    assert [len(trees(n)) for n in range(1, 11)] == [1, 1, 2, 5, 14, 42, 132, 429, 1430, 4862]


@pytest.mark.parametrize("kind", ["falling", "arbitrary"])
def test_nothing_beats_it_among_all_trees_of_ten_nodes(kind: str) -> None:
    drawn = vectors(kind)
    value = Value(drawn[:, None])
    wanted = [value.best(nodes) for nodes in range(1, 11)]
    for number, accept in enumerate(drawn):
        found = OptimalTrees(accept, 10)
        for nodes in range(1, 11):
            assert found.expected[nodes] == pytest.approx(wanted[nodes - 1][number], abs=1e-12)
            paths = found.paths(nodes)
            assert len(paths) < nodes + 1
            assert expected_tokens(accept, paths) == pytest.approx(found.expected[nodes], abs=1e-12)


@pytest.mark.parametrize("kind", ["falling", "arbitrary"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nor_with_a_limit_of_depth(kind: str, depth: int) -> None:
    drawn = vectors(kind, count=20)
    value = Value(drawn[:, None])
    for nodes in (4, 9):
        wanted = value.best(nodes, depth)
        for number, accept in enumerate(drawn):
            found = OptimalTrees(accept, nodes, depth)
            assert found.expected[nodes] == pytest.approx(wanted[number], abs=1e-12)
            paths = found.paths(nodes)
            assert max(map(len, paths)) <= depth
            assert expected_tokens(accept, paths) == pytest.approx(wanted[number], abs=1e-12)


@pytest.mark.parametrize("depth", [2, 3, 5, None])
def test_nor_where_acceptance_differs_by_depth(depth: int | None) -> None:
    drawn = vectors("falling", count=60).reshape(20, 3, 9)
    value = Value(drawn)
    wanted = value.best(8, 99 if depth is None else depth)
    for number, accept in enumerate(drawn):
        found = OptimalTrees(accept, 8, depth)
        assert found.expected[8] == pytest.approx(wanted[number], abs=1e-12)
        assert expected_tokens(accept, found.paths(8)) == pytest.approx(wanted[number], abs=1e-12)


def test_the_comparison_sees_a_worse_tree() -> None:
    """The negative control: a chain is not as good as the best tree of as many nodes."""
    accept = vectors("falling")[0]
    chain = [list(path) for path in StaticTree.chain(9).paths]
    assert expected_tokens(accept, chain) < OptimalTrees(accept, 10).expected[10] - 1e-3


def by_greed(accept: np.ndarray, nodes: int, depth: int) -> float:
    """The likeliest nodes first: best where better children and parents are never less likely."""
    total, heap = 0.0, [(-1.0, 0, 0, 1.0)]  # score, depth, rank, the parent's score
    for _ in range(nodes):
        score, level, rank, above = heapq.heappop(heap)
        total -= score
        if level and rank + 1 < len(accept):
            heapq.heappush(heap, (-above * accept[rank + 1], level, rank + 1, above))
        if level < depth:
            heapq.heappush(heap, (score * accept[0], level + 1, 0, -score))
    return total


@pytest.mark.parametrize("depth", [1, 4, 24, None])
def test_greed_finds_the_same_at_512_nodes(depth: int | None) -> None:
    found = OptimalTrees(POWER_LAW, 512, depth)
    for nodes in (2, 17, 128, 512):
        wanted = by_greed(POWER_LAW, nodes, depth or nodes)
        assert found.expected[nodes] == pytest.approx(wanted, rel=1e-12)


def test_expected_tokens_keep_growing_and_beat_independent_sequences() -> None:
    found = OptimalTrees(POWER_LAW, 512)
    assert (np.diff(found.expected[1:]) > 1e-4).all()
    # 16 chains under one root share the other 511 nodes.
    lengths = [511 // 16 + (chain < 511 % 16) for chain in range(16)]
    chains = [[chain] + [0] * (n - 1) for chain, n in enumerate(lengths)]
    assert StaticTree(chains).nodes == 512
    assert found.expected[512] >= 1.2 * expected_tokens(POWER_LAW, chains)
    tree = StaticTree(found.paths(512))
    assert tree.nodes == 512 and tree.max_depth < 24


@pytest.mark.parametrize("width", [511, 16])
def test_512_nodes_and_24_levels_take_under_two_seconds(width: int) -> None:
    begun = time.perf_counter()
    found = OptimalTrees(POWER_LAW[:width], 512, 24)
    paths = found.paths(512)
    assert time.perf_counter() - begun < 2
    assert len(paths) == 511


def test_small_cases() -> None:
    assert expected_tokens([0.5, 0.25], [[0], [1], [0, 0]]) == 2.0
    assert OptimalTrees([0.5], 1).paths(1) == []
    assert OptimalTrees([0.5], 5, depth=0).paths(5) == []
    assert OptimalTrees([0.5], 3).expected.tolist() == [0, 1, 1.5, 1.75]
    # A useless child may carry a useful sibling.
    assert OptimalTrees([0.0, 0.9], 3).paths(3) == [[0], [1]]
    # No room for six nodes under two children a node and one level: fewer are used.
    assert OptimalTrees([0.5, 0.2], 6, depth=1).paths(6) == [[0], [1]]


@pytest.mark.parametrize(
    ("accept", "nodes", "depth"),
    [([], 4, None), ([0.5, 1.5], 4, None), ([-0.1], 4, None), ([0.5], 0, None), ([0.5], 4, -1)],
)
def test_refusals(accept: list[float], nodes: int, depth: int | None) -> None:
    with pytest.raises(ValueError, match="expected probabilities"):
        OptimalTrees(accept, nodes, depth)
