"""The Triton kernels of `best`, which defines what they compute: one program for a row's part.

Each finds the best of its part, one after another: of what comes after the last one found, in the
order of values, and of places where those are equal. A second launch does the same with all that
were found, so nothing is sorted. They compare exactly; sums are float32, and float64 for float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_BLOCK = 1024  # of a row at least, for each program
_PARTS = 128  # of a row at most
_NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # the place of what is missing


@triton.jit
def _next(found, places, last, last_place):
    """The best after the last one: its value, and its place."""
    left = (found < last) | ((found == last) & (places > last_place))
    best = tl.max(tl.where(left, found, float("-inf")), 0)
    return best, tl.min(tl.where(left & (found == best), places, _NOWHERE), 0)


@triton.jit
def _shift(best):
    """What is taken off scores before their exponentials are summed."""
    return tl.where(tl.abs(best) == float("inf"), 0.0, best)


@triton.jit
def _part(scores, values, places, sums, width, COUNT: tl.constexpr, LOGS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """The best of a part, NaN where a score is, and the sum of their exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    where = part * BLOCK + tl.arange(0, BLOCK)
    ok = where < width
    found = tl.load(scores + row * width + where, ok, float("-inf"))
    if found.dtype != tl.float64:
        found = found.to(tl.float32)
    where = tl.where(ok, where, _NOWHERE)
    broken = tl.max((found != found).to(tl.int32), 0) > 0  # type: ignore
    at = row * tl.num_programs(1) + part
    last, last_place = tl.cast(float("inf"), found.dtype), tl.cast(-1, tl.int32)
    if LOGS:
        top, _ = _next(found, where, last, last_place)
        tl.store(sums + at, tl.sum(tl.exp(found - _shift(top)), 0))
    for number in range(COUNT):
        last, last_place = _next(found, where, last, last_place)
        shown = tl.where(broken, float("nan"), last)
        tl.store(values + at * COUNT + number, shown)
        tl.store(places + at * COUNT + number, last_place)


@triton.jit(do_not_specialize=["parts"])
def _merge(values, places, sums, best, tokens, parts, COUNT: tl.constexpr, LOGS: tl.constexpr,
           PARTS: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """The best of a row, of those of its parts."""
    row, along = tl.program_id(0).to(tl.int64), tl.arange(0, FOUND)
    ok, first = along < parts * COUNT, row * parts * COUNT
    found = tl.load(values + first + along, ok, float("-inf"))
    where = tl.load(places + first + along, ok, _NOWHERE)
    broken = tl.max((found != found).to(tl.int32), 0) > 0  # type: ignore
    last, last_place = tl.cast(float("inf"), found.dtype), tl.cast(-1, tl.int32)
    logs = tl.cast(0.0, found.dtype)
    if LOGS:
        top, _ = _next(found, where, last, last_place)
        every = tl.arange(0, PARTS)
        tops = tl.load(values + first + every * COUNT, every < parts, float("-inf"))
        masses = tl.load(sums + row * parts + every, every < parts, 0.0)
        masses = tl.where(masses == 0, 0.0, masses * tl.exp(_shift(tops) - _shift(top)))
        logs = tl.log(tl.sum(masses, 0)) + _shift(top)
    for number in range(COUNT):
        last, last_place = _next(found, where, last, last_place)
        shown = tl.where(broken, float("nan"), last)
        if LOGS:
            shown = shown.to(tl.float64) - logs.to(tl.float64)
        tl.store(best + row * COUNT + number, shown)
        place = tl.where(last_place == _NOWHERE, 0, last_place)  # in a broken row alone
        tl.store(tokens + row * COUNT + number, place.to(tl.int64))


def best_of(scores: Tensor, count: int, logs: bool = False) -> tuple[Tensor, Tensor]:
    """See `best.best_of`, and `best.best_log_probabilities` with `logs`."""
    part: Any = _part
    merge: Any = _merge
    scores, width = scores.contiguous(), scores.shape[-1]
    rows = scores.numel() // width
    block = max(_BLOCK, triton.next_power_of_2(triton.cdiv(width, _PARTS)))
    parts = triton.cdiv(width, block)
    sort = torch.float64 if scores.dtype == torch.float64 else torch.float32
    values = scores.new_empty(rows, parts, count, dtype=sort)
    places = scores.new_empty(rows, parts, count, dtype=torch.int32)
    sums = scores.new_empty(rows, parts, dtype=sort) if logs else values
    shape = (*scores.shape[:-1], count)
    best = scores.new_empty(shape, dtype=torch.float64 if logs else scores.dtype)
    tokens = scores.new_empty(shape, dtype=torch.int64)
    with launching_on(scores):
        part[rows, parts](
            scores, values, places, sums, width, COUNT=count, LOGS=logs, BLOCK=block
        )  # fmt: skip
        merge[(rows,)](
            values, places, sums, best, tokens, parts, COUNT=count, LOGS=logs,
            PARTS=triton.next_power_of_2(parts), FOUND=triton.next_power_of_2(parts * count),
        )  # fmt: skip
    return best, tokens
