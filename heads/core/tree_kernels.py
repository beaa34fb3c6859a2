"""The Triton kernel of `tree._shape`, which defines what it computes: one program a row.

Each node walks up to the root, all nodes at once, and notes whom it meets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_CHUNK = 16  # of the nodes that each one is compared with at once


@triton.jit(do_not_specialize=["nodes", "deepest"])
def _shape(
    parents, depth, ancestors, paths, rank, nodes, deepest, NODES: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    ok, first = node < nodes, row * nodes
    above = tl.load(parents + first + node, ok, -1)
    before = tl.zeros([NODES], tl.int32)
    for start in range(0, nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(parents + first + other, other < nodes, -2)
        alike = (theirs[None, :] == above[:, None]) & (other[None, :] < node[:, None])
        before += tl.sum(alike.to(tl.int32), 1)
        at = (first + node[:, None]) * nodes + other[None, :]
        inside = ok[:, None] & (other < nodes)[None, :]
        tl.store(ancestors + at, (other[None, :] == node[:, None]).to(tl.int8), inside)
    tl.store(rank + first + node, before.to(tl.int64), ok)
    steps = tl.zeros([NODES], tl.int32)
    at = tl.where(ok, above, -1)
    for _ in range(deepest):
        steps += (at >= 0).to(tl.int32)
        at = tl.load(parents + first + at, at >= 0, -1)
    tl.store(depth + first + node, steps.to(tl.int64), ok)
    tl.debug_barrier()
    at = node.to(tl.int64)
    for up in range(deepest + 1):
        there = ok & (at >= 0)
        line = (first + node) * (deepest + 1)
        tl.store(paths + line + steps - up, at, there)
        tl.store(paths + line + up, node.to(tl.int64), ok & (up > steps))
        tl.store(ancestors + (first + node) * nodes + at, tl.full([NODES], 1, tl.int8), there)
        at = tl.load(parents + first + at, there, -1)


def shape(parents: Tensor, deepest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depth, ancestors, paths and ranks, see `Topology`."""
    kernel: Any = _shape
    parents = parents.contiguous()
    batch, nodes = parents.shape
    depth, rank = torch.empty_like(parents), torch.empty_like(parents)
    ancestors = parents.new_empty(batch, nodes, nodes, dtype=torch.bool)
    paths = parents.new_empty(batch, nodes, deepest + 1)
    with launching_on(parents):
        kernel[(batch,)](
            parents, depth, ancestors.view(torch.int8), paths, rank, nodes, deepest,
            NODES=max(triton.next_power_of_2(nodes), 2), CHUNK=_CHUNK,
        )  # fmt: skip
    return depth, ancestors, paths, rank
