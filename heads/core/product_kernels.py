"""Triton kernels of linear layers for the few rows of a token tree.

Such a product is bound by reading the weights, each once. Layers that read the same states are one
launch: three of them, or the two of a gated product with the product itself; no merged copy of the
weights is needed. `fused_products` defines what they compute. Sums are taken in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on, shared_memory


@triton.jit
def _sums_of_one(
    states, one, two, column, ok_column, width,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """One row of states times the columns of one or two weights: [1, COLUMNS] each.

    So few operations need no matrix unit, and what is read goes to the registers at once.
    """
    along = tl.arange(0, DEPTH)
    left = tl.zeros([COLUMNS, DEPTH], tl.float32)
    right = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in range(0, width, DEPTH):
        at = column[:, None] * width + (start + along)[None, :]
        if EVEN:
            state = tl.load(states + start + along)
            factor = tl.load(one + at, eviction_policy="evict_first")
            other = tl.load(two + at, eviction_policy="evict_first") if BOTH else factor
        else:
            ok = start + along < width
            both = ok_column[:, None] & ok[None, :]
            state = tl.load(states + start + along, mask=ok, other=0.0)
            factor = tl.load(one + at, mask=both, other=0.0)
            other = tl.load(two + at, mask=both, other=0.0) if BOTH else factor
        state = state.to(tl.float32)[None, :]
        left += factor.to(tl.float32) * state
        if BOTH:
            right += other.to(tl.float32) * state
    return tl.sum(left, 1)[None, :], tl.sum(right, 1)[None, :]  # type: ignore


@triton.jit
def _sum(
    states, weight, row, ok_row, column, ok_column, width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """states [ROWS, width] times the columns of a weight [outputs, width]: [ROWS, COLUMNS].

    ACROSS computes the transpose, for matrix units that take many rows and few columns.
    """
    along = tl.arange(0, DEPTH)
    if ACROSS:
        left = weight + column[:, None] * width + along[None, :]
        right = states + row[None, :] * width + along[:, None]
        ok_left, ok_right = ok_column[:, None], ok_row[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        left = states + row[:, None] * width + along[None, :]
        right = weight + column[None, :] * width + along[:, None]
        ok_left, ok_right = ok_row[:, None], ok_column[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, DEPTH):
        if EVEN:  # rows alone may be fewer
            if ACROSS:
                first = tl.load(left)
                second = tl.load(right, mask=ok_right, other=0.0)
            else:
                first = tl.load(left, mask=ok_left, other=0.0)
                second = tl.load(right)
        else:
            ok = start + along < width
            first = tl.load(left, mask=ok_left & ok[None, :], other=0.0)
            second = tl.load(right, mask=ok[:, None] & ok_right, other=0.0)
        total = tl.dot(first, second, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    return tl.trans(total) if ACROSS else total


@triton.jit
def _columns_of_one(
    states, weight, bias, out, row, column, rows, width, size, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Write some columns of one layer, for all rows."""
    ok_row, ok_column, at = row < rows, column < size, column.to(tl.int64)
    if ROWS == 1:
        total, _ = _sums_of_one(
            states, weight, weight, at, ok_column, width, COLUMNS, DEPTH, EVEN,
            False,  # type: ignore
        )  # fmt: skip
    else:
        total = _sum(
            states, weight, row, ok_row, at, ok_column, width, ROWS, COLUMNS, DEPTH, ACROSS, EVEN
        )
    if BIAS:
        total += tl.load(bias + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
    there = out + row[:, None] * size + column[None, :]
    tl.store(there, total.to(out.dtype.element_ty), mask=ok_row[:, None] & ok_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def _three(
    states, one, two, three, out_one, out_two, out_three, bias_one, bias_two, bias_three,
    rows, width, size_one, size_two, size_three, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr,
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
    _columns_of_one(
        states, weight, bias, out, row, column, rows, width, size, BIAS, ROWS, COLUMNS, DEPTH,
        ACROSS, EVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _gated(
    states, gate, up, out, bias_gate, bias_up, rows, width, size, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Some columns of SiLU(gate) · up, for all rows; each product is rounded first."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok_row, ok_column, at = row < rows, column < size, column.to(tl.int64)
    if ROWS == 1:
        left, right = _sums_of_one(
            states, gate, up, at, ok_column, width, COLUMNS, DEPTH, EVEN, True,  # type: ignore
        )  # fmt: skip
    else:
        left = _sum(
            states, gate, row, ok_row, at, ok_column, width, ROWS, COLUMNS, DEPTH, ACROSS, EVEN
        )
        right = _sum(
            states, up, row, ok_row, at, ok_column, width, ROWS, COLUMNS, DEPTH, ACROSS, EVEN
        )
    if BIAS:
        left += tl.load(bias_gate + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
        right += tl.load(bias_up + column, mask=ok_column, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    found = (left * tl.sigmoid(left)).to(kind).to(tl.float32) * right
    there = out + row[:, None] * size + column[None, :]
    tl.store(there, found.to(kind), mask=ok_row[:, None] & ok_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def _one(
    states, weight, out, bias, rows, width, size, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some columns of one layer, for all rows."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _columns_of_one(
        states, weight, bias, out, row, column, rows, width, size, BIAS, ROWS, COLUMNS, DEPTH,
        ACROSS, EVEN,
    )  # fmt: skip


class _Cut(NamedTuple):
    """How a product is cut into programs: so many columns each, which read so much of the rows at a
    time."""

    columns: int
    depth: int  # of two bytes each
    stages: int  # fewer where a GPU has less shared memory
    warps: int = 4
    across: bool = False


_CUTS = {
    "three": {1: _Cut(2, 1024, 1), 16: _Cut(64, 128, 6), 64: _Cut(32, 128, 4)},
    "gated": {1: _Cut(2, 1024, 1), 16: _Cut(128, 128, 4, 4, True), 64: _Cut(64, 128, 3, 4, True)},
    "one": {1: _Cut(2, 2048, 1, 8), 16: _Cut(16, 512, 4, 2, True), 64: _Cut(32, 128, 6)},
    "output": {16: _Cut(128, 128, 4, 8, True), 64: _Cut(64, 64, 3, 4, True)},
}
"""By what was fastest for up to so many rows of the layers of an 8 B shape on an H200."""

_MANY = _Cut(64, 64, 4, 8)  # of more rows

_OUTPUTS = 1 << 15  # columns from which a layer is cut as an output layer is


def _cut(states: Tensor, weights: list[Tensor], kind: str) -> dict[str, Any]:
    width = states.shape[-1]
    rows = triton.next_power_of_2(states.numel() // width)
    most = next((most for most in _CUTS[kind] if rows <= most), None)
    cut = _MANY if most is None else _CUTS[kind][most]
    depth = cut.depth * 2 // states.element_size()
    if most == 1:
        depth = min(cut.depth, triton.next_power_of_2(width))
    padded = 1 if most == 1 else max(16, rows)
    staged = (padded + cut.columns) * depth * states.element_size()
    even = width % depth == 0 and all(len(weight) % cut.columns == 0 for weight in weights)
    return {
        "ROWS": padded, "COLUMNS": cut.columns, "DEPTH": depth, "ACROSS": cut.across, "EVEN": even,
        "num_warps": cut.warps,
        "num_stages": max(1, min(cut.stages, shared_memory(states.device) // staged)),
    }  # fmt: skip


def three_layers(
    states: Tensor, weights: list[Tensor], biases: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused_products.three_layers`; of at most `MOST_ROWS` rows."""
    kernel: Any = _three
    states, width = states.contiguous(), states.shape[-1]
    sizes, cut = [len(weight) for weight in weights], _cut(states, weights, "three")
    one, two, three = (states.new_empty(*states.shape[:-1], size) for size in sizes)
    programs = sum(triton.cdiv(size, cut["COLUMNS"]) for size in sizes)
    with launching_on(states):
        kernel[(programs,)](
            states, *weights, one, two, three, *(biases or weights), states.numel() // width, width,
            *sizes, BIAS=bool(biases), **cut,
        )  # fmt: skip
    return one, two, three


def gated_layers(states: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """See `fused_products.gated_layers`; of at most `MOST_ROWS` rows."""
    kernel: Any = _gated
    states, (size, width) = states.contiguous(), weights[0].shape
    out, cut = states.new_empty(*states.shape[:-1], size), _cut(states, weights, "gated")
    with launching_on(states):
        kernel[(triton.cdiv(size, cut["COLUMNS"]),)](
            states, *weights, out, *(biases or weights), states.numel() // width, width, size,
            BIAS=bool(biases), **cut,
        )  # fmt: skip
    return out


def one_layer(states: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """See `fused_products.one_layer`; of at most `MOST_ROWS` rows."""
    kernel: Any = _one
    states, (size, width) = states.contiguous(), weights[0].shape
    out = states.new_empty(*states.shape[:-1], size)
    cut = _cut(states, weights, "one" if size < _OUTPUTS else "output")
    with launching_on(states):
        kernel[(triton.cdiv(size, cut["COLUMNS"]),)](
            states, weights[0], out, *(biases or weights), states.numel() // width, width, size,
            BIAS=bool(biases), **cut,
        )  # fmt: skip
    return out
