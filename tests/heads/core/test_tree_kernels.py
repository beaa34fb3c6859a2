"""The shape of a tree in one launch is the one that its definition gives."""

import json

import pytest
import torch

from headstart.heads import Topology
from headstart.heads.core import tree
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.tiny import random_parents

CASES = [(1, 1), (2, 1), (7, 3), (16, 6), (40, 5), (64, 8)]  # nodes and rows


def wrong(device: str = "cpu") -> list[str]:
    """Cases that differ in depth, ancestors, paths or ranks, as deep as the deepest, and deeper."""
    from headstart.heads.core import tree_kernels as kernels

    found, generator = [], torch.Generator().manual_seed(0)
    for nodes, rows in CASES:
        parents = torch.tensor([random_parents(nodes, generator) for _ in range(rows)])
        deepest = int(tree.ancestor_mask(parents).sum(-1).max()) - 1
        for bound in (deepest, deepest + 3):
            own = kernels.shape(parents.to(device), bound)
            pairs = zip(own, tree._shape(parents, bound), strict=True)
            same = all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)
            found += [] if same else [f"{nodes} nodes, {rows} rows, {bound} deep"]
    return found


@without_triton
def test_the_kernel_finds_the_same() -> None:
    assert run_interpreted(__name__) == []


@pytest.mark.gpu
@without_triton
def test_the_kernel_compiled() -> None:
    assert wrong("cuda") == []


def test_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = torch.tensor([[-1, 0, 0, 1]])
    plain = Topology.from_parents(parents, 2)
    monkeypatch.setattr(tree, "_has_kernels", lambda parents: True)
    monkeypatch.setattr(
        tree, "_shape_launch", lambda *given: [each + 0 for each in tree._shape(*given)]
    )
    assert torch.equal(Topology.from_parents(parents, 2).paths, plain.paths)


if __name__ == "__main__":
    print(json.dumps(wrong()))
