"""The Triton kernels of `tree._shape` and `tree_lines`, which define what they compute."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_CHUNK = 16  # of the nodes that each one is compared with at once
_LINE = 64  # numbers of a line, at least, so that few kernels serve all trees
_STRIDES = ("l_row", "p_row", "p_node", "a_row", "a_node", "a_other")


@triton.jit(do_not_specialize=["nodes", "deepest"])
def _shape(
    parents, depth, ancestors, paths, rank, nodes, deepest, NODES: tl.constexpr, CHUNK: tl.constexpr
):
    """One row. Each node walks up to the root, all nodes at once, and notes whom it meets."""
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


@triton.jit(do_not_specialize=["nodes", "window", *_STRIDES])
def _pack(
    lengths, positions, ancestors, packed, nodes, window, l_row, p_row, p_node, a_row, a_node,
    a_other, WINDOW: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """One node."""
    program, other = tl.program_id(0), tl.arange(0, NODES)
    row, node, ok = (program // nodes).to(tl.int64), program % nodes, other < nodes
    seen = tl.load(ancestors + row * a_row + node * a_node + other * a_other, ok, 0) != 0
    line = packed + program.to(tl.int64) * (nodes + 2)
    first = tl.zeros([], tl.int64)
    if WINDOW:
        theirs = positions + row * p_row
        oldest = tl.load(theirs + node * p_node) - (window - 1)
        first = tl.maximum(oldest, 0)
        seen = seen & (tl.load(theirs + other * p_node, ok, 0) >= oldest)
    tl.store(line, first.to(tl.int32))
    tl.store(line + 1, tl.load(lengths + row * l_row).to(tl.int32))
    tl.store(line + 2 + other, seen.to(tl.int32), ok)


@triton.jit(do_not_specialize=["before", "width", *_STRIDES])
def _grow(lines, parent, grown, positions, before, width, p_row, p_node, SEEN: tl.constexpr):
    """One line."""
    program, along, total = tl.program_id(0), tl.arange(0, SEEN), before + width
    row, line = (program // total).to(tl.int64), program % total
    above = line.to(tl.int64)
    if line >= before:
        above = tl.load(parent + row * p_row + (line - before) * p_node) + 1
    value = tl.load(lines + (row * before + above) * (before + 1) + along, along <= before, 0)
    value = tl.where((line >= before) & (along == line + 1), 1, value)
    tl.store(grown + program.to(tl.int64) * (total + 1) + along, value, along <= total)
    if line > 0:
        tl.store(positions + row * (total - 1) + line - 1, tl.sum(value, 0).to(tl.int64) - 1)


def pack(lengths: Tensor, positions: Tensor, ancestors: Tensor, window: int | None) -> Tensor:
    """See `tree_lines.pack_tree`, without its second dimension."""
    kernel: Any = _pack
    (batch, nodes), bools = positions.shape, ancestors.dtype == torch.bool
    ancestors = ancestors.expand(batch, -1, -1)
    packed = lengths.new_empty(batch, nodes, 2 + nodes, dtype=torch.int32)
    with launching_on(lengths):
        kernel[(batch * nodes,)](
            lengths, positions, ancestors.view(torch.int8) if bools else ancestors, packed, nodes,
            window or 0, lengths.stride(0), *positions.stride(), *ancestors.stride(),
            WINDOW=window is not None, NODES=max(triton.next_power_of_2(nodes), _LINE),
        )  # fmt: skip
    return packed


def grow(lines: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """See `tree_lines.grow_lines`."""
    kernel: Any = _grow
    (batch, before), width, lines = lines.shape[:2], parent.shape[1], lines.contiguous()
    total = before + width
    grown = lines.new_empty(batch, total, total + 1)
    positions = parent.new_empty(batch, total - 1)
    with launching_on(lines):
        kernel[(batch * total,)](
            lines, parent, grown, positions, before, width, *parent.stride(),
            SEEN=max(triton.next_power_of_2(total + 1), _LINE),
        )  # fmt: skip
    return grown, positions


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
