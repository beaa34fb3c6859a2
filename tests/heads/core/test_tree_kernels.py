"""The shape of a tree, and what its nodes see, are in one launch what their definitions give."""

import json

import pytest
import torch

from headstart.heads import Topology
from headstart.heads.core import tree, tree_lines
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.tiny import random_parents

CASES = [(1, 1), (2, 1), (7, 3), (16, 6), (40, 5), (64, 8)]  # nodes and rows
FEW = 2  # rows in the interpreter, which takes a program after another


def wrong(device: str = "cpu") -> list[str]:
    """Cases that differ: in depth, ancestors, paths or ranks, as deep as the deepest and deeper, or
    in their lines."""
    from headstart.heads.core import tree_kernels as kernels

    found, generator = [], torch.Generator().manual_seed(0)
    for nodes, rows in CASES:
        rows = min(rows, FEW) if device == "cpu" else rows
        parents = torch.tensor([random_parents(nodes, generator) for _ in range(rows)])
        deepest = int(tree.ancestor_mask(parents).sum(-1).max()) - 1
        for bound in (deepest, deepest + 3):
            own = kernels.shape(parents.to(device), bound)
            pairs = zip(own, tree._shape(parents, bound), strict=True)
            same = all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)
            found += [] if same else [f"{nodes} nodes, {rows} rows, {bound} deep"]
        found += wrong_lines(parents, deepest, device)
    return found


def wrong_lines(parents: torch.Tensor, deepest: int, device: str) -> list[str]:
    """Trees whose packed lines differ, or those that grow by their deepest nodes."""
    from headstart.heads.core import tree_kernels as kernels

    (rows, nodes), found = parents.shape, list[str]()
    depth, ancestors, *_ = tree._shape(parents, deepest)
    lengths = torch.arange(3, 3 + rows)
    shared = depth[:1].expand(rows, -1), ancestors[:1].expand(rows, -1, -1)
    for positions, seen in ((depth, ancestors), shared, (depth, ancestors.int())):
        for window in (None, 4):
            at = lengths.unsqueeze(1) + positions
            own = kernels.pack(lengths.to(device), at.to(device), seen.to(device), window)
            expected = tree_lines.pack_tree(lengths, at, seen, window).squeeze(1)
            same = torch.equal(own.cpu(), expected)
            found += [] if same else [f"{nodes} packed nodes, {rows} rows, window {window}"]
    lines = torch.stack([torch.zeros_like(lengths), lengths], -1).int().unsqueeze(1)
    for parent in (parents.clamp(max=-1), parents.clamp(min=0, max=nodes - 1)[:, : nodes // 2]):
        if parent.shape[1]:
            own = kernels.grow(lines.to(device), parent.to(device))
            pairs = list(zip(own, tree_lines.grow_lines(lines, parent), strict=True))
            same = all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)
            found += [] if same else [f"{nodes} lines, {rows} rows"]
            lines = pairs[0][1]
    return found


@without_triton
def test_the_kernels_find_the_same() -> None:
    assert run_interpreted(__name__) == []


@pytest.mark.gpu
@without_triton
def test_the_kernels_compiled() -> None:
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
