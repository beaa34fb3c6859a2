"""The Triton kernels of `noise`, which defines what they compute: one program for a row's part.

Integers of 64 bits wrap, and the logarithms are those of CUDA in float64, as torch's are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_BLOCK = 1024
_PARTS = 128  # of a row at most, of which each has its own best token
_ROWS = ["rows", "of_scores", "of_positions"]
_GOLDEN: tl.constexpr = tl.constexpr(-7046029254386353131)
_FIRST: tl.constexpr = tl.constexpr(-4658895280553007687)
_SECOND: tl.constexpr = tl.constexpr(-7723592293110705685)


@triton.jit
def _mix(state):
    """See `noise._splitmix`."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _FIRST
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noisy(scores, seeds, positions, tokens, first, where, ok, row, rows, of_scores, of_positions,
           width, NAMED: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Scores of columns `where` of a row, with their noise, in float64."""
    batch, place = row // rows, row % rows
    position = tl.load(positions + batch * of_positions + place % of_positions)
    key = _mix(tl.load(seeds + batch) + _mix(position + 1) * _GOLDEN)
    names = tokens + row.to(tl.int64) * width if OWN else tokens
    token = tl.load(names + where, ok, 0) if NAMED else where.to(tl.int64)
    bits = _mix(key + (token + first + 1) * _GOLDEN)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    line = (batch * of_scores + place % of_scores).to(tl.int64) * width
    score = tl.load(scores + line + where, ok, float("-inf")).to(tl.float64)
    return score - tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["stream", *_ROWS])
def _add(scores, seeds, positions, tokens, out, stream, rows, of_scores, of_positions, width,
         NAMED: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, where = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok, first = where < width, stream.to(tl.int64) << 40  # see `Stream.first`
    found = _noisy(scores, seeds, positions, tokens, first, where, ok, row, rows, of_scores,
                   of_positions, width, NAMED, OWN)  # fmt: skip
    tl.store(out + row.to(tl.int64) * width + where, found, ok)


@triton.jit(do_not_specialize=[*_ROWS, "steps"])
def _part(scores, seeds, positions, best, token, rows, of_scores, of_positions, width, steps,
          BLOCK: tl.constexpr):  # fmt: skip
    """The best of a part of a row, NaN where one is, and its token."""
    row, part = tl.program_id(0), tl.program_id(1)
    most = tl.full([BLOCK], float("-inf"), tl.float64)
    places = tl.zeros([BLOCK], tl.int32)
    none = tl.zeros([BLOCK], tl.int32)
    for step in range(steps):
        where = (part * steps + step) * BLOCK + tl.arange(0, BLOCK)
        ok = where < width
        found = _noisy(scores, seeds, positions, scores, 0, where, ok, row, rows, of_scores,
                       of_positions, width, False, False)  # fmt: skip # type: ignore
        none = tl.where(ok & (found != found), 1, none)
        more = ok & (found > most)
        most, places = tl.where(more, found, most), tl.where(more, where, places)
    highest = tl.max(most, 0)
    first = tl.min(tl.where(most == highest, places, 0x7FFFFFFF), 0)
    at = row * tl.num_programs(1) + part
    broken = tl.max(none, 0) > 0  # type: ignore
    tl.store(best + at, tl.where(broken, float("nan"), highest))
    tl.store(token + at, first)


@triton.jit(do_not_specialize=["parts"])
def _merge(best, token, out, parts, PARTS: tl.constexpr):
    """The best of a row's parts, the first of equal ones; -1 where it is no finite number."""
    row, along = tl.program_id(0), tl.arange(0, PARTS)
    ok = along < parts
    found = tl.load(best + row * parts + along, ok, float("-inf"))
    names = tl.load(token + row * parts + along, ok, 0x7FFFFFFF)
    none = tl.max((found != found).to(tl.int32), 0)
    highest = tl.max(tl.where(found != found, float("-inf"), found), 0)
    first = tl.min(tl.where(found == highest, names, 0x7FFFFFFF), 0)
    finite = (none == 0) & (highest - highest == 0)  # type: ignore
    tl.store(out + row, tl.where(finite, first, -1).to(tl.int64))


def _sizes(scores: Tensor, positions: Tensor) -> tuple[int, int, int, int]:
    """Rows of a batch: of the result, the scores and the positions; and V."""
    _, of_scores, width = scores.shape
    return max(of_scores, positions.shape[1]), of_scores, positions.shape[1], width


def add_noise(
    scores: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor | None, stream: int
) -> Tensor:
    """See `noise.add_noise`."""
    scores, seeds, positions = scores.contiguous(), seeds.contiguous(), positions.contiguous()
    sizes = _sizes(scores, positions)
    rows, *_, width = sizes
    out = scores.new_empty(len(scores), rows, width, dtype=torch.float64)
    names = scores if tokens is None else tokens.contiguous()
    kernel: Any = _add
    with launching_on(scores):
        kernel[len(scores) * rows, triton.cdiv(width, _BLOCK)](
            scores, seeds, positions, names, out, stream, *sizes, NAMED=tokens is not None,
            OWN=tokens is not None and tokens.dim() > 1, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def best_with_noise(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `noise.best_with_noise`."""
    scores, seeds, positions = scores.contiguous(), seeds.contiguous(), positions.contiguous()
    sizes = _sizes(scores, positions)
    rows, *_, width = sizes
    count = len(scores) * rows
    steps = triton.cdiv(triton.cdiv(width, _BLOCK), _PARTS)
    parts = triton.cdiv(width, _BLOCK * steps)
    best = scores.new_empty(count, parts, dtype=torch.float64)
    token = scores.new_empty(count, parts, dtype=torch.int32)
    out = scores.new_empty(len(scores), rows, dtype=torch.int64)
    part: Any = _part
    merge: Any = _merge
    with launching_on(scores):
        part[count, parts](
            scores, seeds, positions, best, token, *sizes, steps, BLOCK=_BLOCK
        )  # fmt: skip
        merge[(count,)](best, token, out, parts, PARTS=triton.next_power_of_2(parts))
    return out
