"""Trees: ancestors, depths and paths against walks up the parents."""

import pytest
import torch

from headstart.heads.core import Topology, ancestor_mask, parents_of_paths
from tests.support.tiny import path_to, random_parents


def batches() -> list[list[list[int]]]:
    """Ragged and even batches of random trees, and the extreme shapes."""
    generator = torch.Generator().manual_seed(0)
    random = [
        [random_parents(nodes, generator) for _ in range(3)]
        for nodes in (2, 3, 5, 8, 9, 17, 33, 64)
    ]
    chain, star = [-1, *range(16)], [-1] + [0] * 16
    return [[[-1]], [chain], [star], [chain, star], *random]


@pytest.mark.parametrize("parents", batches(), ids=lambda rows: f"{len(rows)}x{len(rows[0])}")
def test_against_a_walk(parents: list[list[int]]) -> None:
    paths = [[path_to(row, node) for node in range(len(row))] for row in parents]
    deepest = max(len(path) for row in paths for path in row) - 1
    shape = Topology.from_parents(torch.tensor(parents), deepest)
    assert shape.nodes == len(parents[0])
    for row, walked in enumerate(paths):
        for node, path in enumerate(walked):
            ancestors = shape.ancestors[row, node].nonzero().flatten().tolist()
            assert ancestors == path  # parents come first, so ascending is root to node
            assert shape.depth[row, node] == len(path) - 1
            padded = path + [node] * (deepest + 1 - len(path))
            assert shape.paths[row, node].tolist() == padded
    assert shape.parent_or_root.min() >= 0


def test_the_walk_sees_a_wrong_parent() -> None:
    parents = [-1, 0, 1, 2, 2]
    moved = [-1, 0, 1, 1, 2]
    assert not torch.equal(
        ancestor_mask(torch.tensor([parents])), ancestor_mask(torch.tensor([moved]))
    )


def test_expand_repeats_the_row() -> None:
    shape = Topology.from_parents(torch.tensor([[-1, 0, 0, 1]]), 2)
    wide = shape.expand(3)
    assert wide.ancestors.shape == (3, 4, 4) and wide.paths.shape == (3, 4, 3)
    assert all(torch.equal(wide.paths[row], shape.paths[0]) for row in range(3))
    assert wide.nodes == 4 and wide.max_depth == 2


def test_rank_paths_become_nodes() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        depths = torch.randint(1, 5, (6,), generator=generator).tolist()
        paths = [torch.randint(0, 3, (d,), generator=generator).tolist() for d in depths]
        parents, ranks, depth = parents_of_paths(paths)
        found = set()
        for node in range(1, len(parents)):
            assert parents[node] < node and depth[node] == depth[parents[node]] + 1
            found.add(tuple(ranks[step] for step in path_to(parents, node)[1:]))
        # Every prefix of every path, each once.
        assert found == {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
        assert len(found) == len(parents) - 1
        siblings = [(depth[n], parents[n], ranks[n]) for n in range(1, len(parents))]
        assert siblings == sorted(siblings)


def test_no_path_is_the_root_alone() -> None:
    assert parents_of_paths([]) == ([-1], [0], [0])
