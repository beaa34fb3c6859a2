"""Triton kernels of linear layers that read the same states, for the few rows of a token tree.

Such a product is bound by reading the weights, each once. What it saves is launches: three layers
are one, and so are the two of a gated product with the product itself; no merged copy of the
weights is needed. `fused_products` defines what they compute. Sums are taken in float32.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_COLUMNS = 16
_DEPTH = 128  # terms of a sum that are read at once
_WARPS, _STAGES = 4, 4


@triton.jit
def _sum(
    states, weight, row, ok_row, column, ok_column, width, total, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """states [ROWS, width] times the columns of a weight [outputs, width]: [ROWS, COLUMNS]."""
    along = tl.arange(0, DEPTH)
    left = states + row[:, None] * width + along[None, :]
    right = weight + column[None, :] * width + along[:, None]
    for start in range(0, width, DEPTH):
        ok = start + along < width
        some = tl.load(left, mask=ok_row[:, None] & ok[None, :], other=0.0)
        factor = tl.load(right, mask=ok[:, None] & ok_column[None, :], other=0.0)
        total = tl.dot(some, factor, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    return total


@triton.jit(do_not_specialize=["rows"])
def _three(
    states, one, two, three, out_one, out_two, out_three, bias_one, bias_two, bias_three,
    rows, width, size_one, size_two, size_three,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some columns of one of three layers, for all rows."""
    tile = tl.program_id(0)
    weight, bias, out, size = one, bias_one, out_one, size_one
    before = tl.cdiv(size_one, COLUMNS)
    if tile >= before:
        tile -= before
        weight, bias, out, size = two, bias_two, out_two, size_two
        before = tl.cdiv(size_two, COLUMNS)
        if tile >= before:
            tile -= before
            weight, bias, out, size = three, bias_three, out_three, size_three
    row, column = tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    ok_row, ok_column, at = row < rows, column < size, column.to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = _sum(states, weight, row, ok_row, at, ok_column, width, total, ROWS, DEPTH)
    if BIAS:
        total += tl.load(bias + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
    there = out + row[:, None] * size + column[None, :]
    tl.store(there, total.to(out.dtype.element_ty), mask=ok_row[:, None] & ok_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    states, gate, up, out, bias_gate, bias_up, rows, width, size,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some columns of SiLU(gate) · up, for all rows; each product is rounded first."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok_row, ok_column, at = row < rows, column < size, column.to(tl.int64)
    left = tl.zeros([ROWS, COLUMNS], tl.float32)
    left = _sum(states, gate, row, ok_row, at, ok_column, width, left, ROWS, DEPTH)
    right = tl.zeros([ROWS, COLUMNS], tl.float32)
    right = _sum(states, up, row, ok_row, at, ok_column, width, right, ROWS, DEPTH)
    if BIAS:
        left += tl.load(bias_gate + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
        right += tl.load(bias_up + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    found = (left * tl.sigmoid(left)).to(kind).to(tl.float32) * right
    there = out + row[:, None] * size + column[None, :]
    tl.store(there, found.to(kind), mask=ok_row[:, None] & ok_column[None, :])


def _shape(states: Tensor) -> dict[str, int]:
    rows = max(16, triton.next_power_of_2(states.numel() // states.shape[-1]))
    return {
        "ROWS": rows, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH if rows < 64 else _DEPTH // 2,
        "num_warps": _WARPS, "num_stages": _STAGES,
    }  # fmt: skip


def three_layers(
    states: Tensor, weights: list[Tensor], biases: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused_products.three_layers`; of at most `MOST_ROWS` rows."""
    kernel: Any = _three
    states, width = states.contiguous(), states.shape[-1]
    sizes = [len(weight) for weight in weights]
    one, two, three = (states.new_empty(*states.shape[:-1], size) for size in sizes)
    programs = sum(triton.cdiv(size, _COLUMNS) for size in sizes)
    with launching_on(states):
        kernel[(programs,)](
            states, *weights, one, two, three, *(biases or weights), states.numel() // width, width,
            *sizes, BIAS=bool(biases), **_shape(states),
        )  # fmt: skip
    return one, two, three


def gated_layers(states: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """See `fused_products.gated_layers`; of at most `MOST_ROWS` rows."""
    kernel: Any = _gated
    states, (size, width) = states.contiguous(), weights[0].shape
    out = states.new_empty(*states.shape[:-1], size)
    with launching_on(states):
        kernel[(triton.cdiv(size, _COLUMNS),)](
            states, *weights, out, *(biases or weights), states.numel() // width, width, size,
            BIAS=bool(biases), **_shape(states),
        )  # fmt: skip
    return out
