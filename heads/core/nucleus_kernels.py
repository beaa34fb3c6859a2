"""The Triton kernel of `nucleus`, which defines what it computes: one program for each row.

The tokens that stay are those above a score, and of its equals the last ones. That score is found
by bisection over the bits of a float32, whose order is that of integers once those of negative
numbers are turned round. Most tokens need not be looked at again: where each of V tokens has less
than (1 - p) / V, all of them together have less than 1 - p, so they go. The others are copied to a
list beforehand, which for the scores of a language model is a few hundred long; for any other it is
longer and the result the same. Nothing is read by the host.

A row is read four times in whole, from the L2 cache but for the first, and written once. Sums are
float64 and then rounded to float32, as torch's running sum on a CPU is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_BLOCK = 4096
_WARPS = 16
_SLACK: tl.constexpr = tl.constexpr(1e-6)  # of a score, more than its logarithm's error


@triton.jit
def _order(scores):
    """Integers in the order of float32 scores; both zeros are one."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["shares"])
def _top_p(scores, out, kept, share, shares, filter_value, width, BLOCK: tl.constexpr):
    share += tl.program_id(0) % shares
    first, along = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    scores, out, kept = scores + first, out + first, kept + first
    limit = (1.0 - tl.load(share)).to(tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        ok = start + along < width
        highest = tl.maximum(highest, tl.load(scores + start + along, ok, float("-inf")))
    top = tl.max(highest, 0)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        ok = start + along < width
        found = tl.load(scores + start + along, ok, float("-inf"))
        sums += tl.exp(found - top).to(tl.float64)
    total = tl.sum(sums, 0).to(tl.float32)  # NaN in rows that stay what they are
    # Scores up to here go, whatever the others are.
    bound = top + tl.log(limit / width * total) - tl.abs(top) * _SLACK - _SLACK
    sums = tl.zeros([BLOCK], tl.float64)
    count = 0
    for start in range(0, width, BLOCK):
        ok = start + along < width
        found = tl.load(scores + start + along, ok, float("-inf"))
        more = ok & ((found > bound) | (found == top))
        sums += tl.where(more, 0.0, tl.exp(found - top) / total).to(tl.float64)
        place = count + tl.cumsum(more.to(tl.int32), 0) - 1
        tl.store(kept + place, found, mask=more)
        count += tl.sum(more.to(tl.int32), 0)  # type: ignore
    gone = tl.sum(sums, 0)
    tl.debug_barrier()
    low, high = _order(bound).to(tl.int64), _order(top).to(tl.int64)
    while high - low > 1:  # at `high` more than 1 - p would go, or it is the highest
        middle = low + ((high - low) >> 1)
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, count, BLOCK):
            ok = start + along < count
            found = tl.load(kept + start + along, ok, float("-inf"))
            mine = ok & (_order(found) <= middle)
            sums += tl.where(mine, tl.exp(found - top) / total, 0.0).to(tl.float64)
        if (gone + tl.sum(sums, 0)).to(tl.float32) > limit:
            high = middle
        else:
            low = middle
    sums = tl.zeros([BLOCK], tl.float64)
    ties = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        ok = start + along < count
        found = tl.load(kept + start + along, ok, float("-inf"))
        chance, order = tl.exp(found - top) / total, _order(found)
        sums += tl.where(ok & (order < high), chance, 0.0).to(tl.float64)
        ties += (ok & (order == high)).to(tl.int32)
        equal = tl.maximum(equal, tl.where(ok & (order == high), chance, 0.0))
    gone += tl.sum(sums, 0)
    many, each = tl.sum(ties, 0), tl.max(equal, 0).to(tl.float64)  # type: ignore
    last = high == _order(top)
    seen = 0
    for start in range(0, width, BLOCK):
        ok = start + along < width
        found = tl.load(scores + start + along, ok, float("-inf"))
        order = _order(found)
        tie = ok & (order == high)
        rank = tie.to(tl.int32)
        if many > 1:  # type: ignore
            rank = seen + tl.cumsum(rank, 0)
            seen += tl.sum(tie.to(tl.int32), 0)  # type: ignore
        goes = (gone + rank * each).to(tl.float32) <= limit
        goes = (order < high) | (tie & goes & ~(last & (rank == many)))
        changed = tl.where(total == total, filter_value, found)
        tl.store(out + start + along, tl.where(goes, changed, found), ok)


def top_p(scores: Tensor, share: Tensor, filter_value: float) -> Tensor:
    """See `nucleus.top_p`."""
    kernel: Any = _top_p
    scores, width = scores.contiguous(), scores.shape[-1]
    out, kept = torch.empty_like(scores), torch.empty_like(scores)
    with launching_on(scores):
        block = min(_BLOCK, triton.next_power_of_2(width))
        kernel[(len(scores),)](
            scores,
            out,
            kept,
            share,
            share.numel(),
            filter_value,
            width,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return out
