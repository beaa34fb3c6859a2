"""The Triton kernels of `candidates`, which defines what they compute: one program for a row.

Nothing is sorted: a candidate's rank is how many others score more, or as much and come earlier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headstart.heads.core.kernels import launching_on

_CHUNK = 16  # of the candidates that each one is compared with at once
_WARPS = 8


@triton.jit
def _ranks(scores, mine, number, count, CHUNK: tl.constexpr):
    """How many of `count` scores, in memory, come before each of one's own."""
    rank = tl.zeros_like(number)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(scores + other, other < count, float("-inf"))
        earlier = (theirs[None, :] == mine[:, None]) & (other[None, :] < number[:, None])
        before = (theirs[None, :] > mine[:, None]) | earlier
        rank += tl.sum((before & (other < count)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["extended", "width", "keep", "first"])
def _level(
    ids, values, above, tokens, scores, kept, inner, parent, best, extended, width, keep, first,
    ONE: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, CANDIDATES)
    count = extended * width
    ok, node = number < count, number // width
    at = row * width + number % width if ONE else row * count + number
    value = tl.load(values + at, ok, float("-inf"))
    value = tl.where(value == value, tl.minimum(value, 0.0), float("-inf"))
    token = tl.where(value == float("-inf"), -1, tl.load(ids + at, ok, -1))
    score = tl.load(above + row * extended + node, ok, float("-inf")) + value
    tl.store(tokens + row * count + number, token, ok)
    tl.store(scores + row * count + number, score, ok)
    tl.debug_barrier()
    rank = _ranks(scores + row * count, score, number, count, CHUNK)
    ok, at = ok & (rank < keep), row * keep + rank
    tl.store(kept + at, number.to(tl.int64), ok)
    tl.store(inner + at, tl.maximum(token, 0), ok)
    tl.store(parent + at, (node + first).to(tl.int64), ok)
    tl.store(best + at, score, ok)


@triton.jit(do_not_specialize=["count", "nodes"])
def _select(
    root, tokens, scores, parents, numbers, new_tokens, above, valid, count, nodes,
    CANDIDATES: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, CANDIDATES)
    ok = place < count
    score = tl.load(scores + row * count + place, ok, float("-inf"))
    rank = _ranks(scores + row * count, score, place, count, CHUNK)
    chosen = ok & (rank < nodes - 1) & (score != float("-inf"))
    number = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0), 0)
    tl.store(numbers + row * count + place, number, ok)
    tl.debug_barrier()
    parent = tl.load(parents + row * count + place, ok, 0)
    under = tl.load(numbers + row * count + parent - 1, ok & (parent > 0), 0)
    at = row * nodes + number
    tl.store(new_tokens + at, tl.load(tokens + row * count + place, ok, 0), chosen)
    tl.store(above + at, under.to(tl.int64), chosen)
    tl.store(valid + at, tl.full([CANDIDATES], 1, tl.int8), chosen)
    node, many = tl.arange(0, NODES), tl.sum(chosen.to(tl.int32), 0)
    left, at = (node < nodes) & ((node == 0) | (node > many)), row * nodes + node  # type: ignore
    first = tl.load(root + row)
    tl.store(new_tokens + at, tl.where(node == 0, first, 0), left)
    tl.store(above + at, tl.where(node == 0, -1, 0).to(tl.int64), left)
    tl.store(valid + at, (node == 0).to(tl.int8), left)


@triton.jit(do_not_specialize=["depth", "width"])
def _ends(kept, best, ends, depth, width, BEAMS: tl.constexpr):
    row, beam = tl.program_id(0).to(tl.int64), tl.arange(0, BEAMS)
    ok, never = beam < width, float("-inf")
    place = -beam.to(tl.float64)
    at = (row * depth + depth - 1) * width + beam
    end = tl.where(tl.load(best + at, ok, never) == never, never, place)
    tl.store(ends + at, end, ok)
    for _ in range(1, depth):
        parent = tl.where(ok, tl.load(kept + at, ok, 0) // width, -1)
        through = tl.where(parent[:, None] == beam[None, :], end[:, None], never)
        dry = tl.max(end, 0) == never
        at -= width
        final = tl.where(tl.load(best + at, ok, never) == never, never, place)
        end = tl.where(dry, final, tl.max(through, 0))
        tl.store(ends + at, end, ok)


def level(
    ids: Tensor, values: Tensor, above: Tensor, keep: int, first: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `candidates.grow_level`."""
    kernel: Any = _level
    batch, extended = above.shape
    width = ids.shape[-1]
    given = [each.contiguous() for each in (ids, values, above)]
    size = batch, extended * width
    tokens, scores = ids.new_empty(size), above.new_empty(size)
    kept, inner, parent = (ids.new_empty(batch, keep) for _ in range(3))
    best = above.new_empty(batch, keep)
    with launching_on(ids):
        kernel[(batch,)](
            *given, tokens, scores, kept, inner, parent, best, extended, width, keep, first,
            ONE=ids.shape[1] == 1, CANDIDATES=_block(size[1]), CHUNK=_CHUNK,
            num_warps=_WARPS,
        )  # fmt: skip
    return tokens, scores, kept, inner, parent, best


def select(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `candidates.select_nodes`."""
    kernel: Any = _select
    batch, count = tokens.shape
    given = [each.contiguous() for each in (root, tokens, scores, parents)]
    numbers = tokens.new_empty(batch, count, dtype=torch.int32)
    new_tokens, above = (tokens.new_empty(batch, nodes) for _ in range(2))
    valid = tokens.new_empty(batch, nodes, dtype=torch.bool)
    with launching_on(tokens):
        kernel[(batch,)](
            *given, numbers, new_tokens, above, valid.view(torch.int8), count, nodes,
            CANDIDATES=_block(count), NODES=_block(nodes), CHUNK=_CHUNK, num_warps=_WARPS,
        )  # fmt: skip
    return new_tokens, above, valid


def ends(kept: Tensor, best: Tensor) -> Tensor:
    """See `candidates.beam_ends`."""
    kernel: Any = _ends
    kept, best = kept.contiguous(), best.contiguous()
    batch, depth, width = kept.shape
    found = torch.empty_like(best)
    with launching_on(best):
        kernel[(batch,)](kept, best, found, depth, width, BEAMS=_block(width))
    return found


def _block(size: int) -> int:
    return max(triton.next_power_of_2(size), 2)
