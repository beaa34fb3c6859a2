"""The Triton kernel that moves an accepted path within the cache; see `cache.plain_move`."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_MOVED = 8 * 1024
"""Bytes that a program moves at once: sixteen registers of each thread of four warps."""


@triton.jit(do_not_specialize=["steps", "a_row", "p_row"])
def _move(
    rows, slots, path, steps, batch, per_entry, columns,
    a_row, a_node, p_row, p_step,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The path of one row of the batch in one entry, for a block of its columns."""
    pair, block = tl.program_id(0), tl.program_id(1)
    entry, row = (pair // batch).to(tl.int64), pair % batch
    step, column = tl.arange(0, STEPS), block * COLUMNS + tl.arange(0, COLUMNS)
    ok = step < steps
    node = tl.load(path + row * p_row + step * p_step, mask=ok, other=0)
    source = tl.load(slots + row * a_row + node * a_node, mask=ok, other=0)
    destination = tl.load(slots + row * a_row + step * a_node, mask=ok, other=0)
    moves = (ok & (source != destination))[:, None] & (column < columns)[None, :]
    here = rows + entry * per_entry + column[None, :]
    value = tl.load(here + source[:, None] * columns, mask=moves)
    # A slot may be both read and written, by different threads, though never by another program:
    # columns, rows and entries are disjoint. So all threads wait here until each has read.
    tl.debug_barrier()
    tl.store(here + destination[:, None] * columns, value, mask=moves)


def move_path(rows: Tensor, slots: Tensor, path: Tensor) -> None:
    """`cache.plain_move` as a kernel, in one launch; `rows` is contiguous.

    A first call compiles, as `attention_kernel` does.
    """
    move: Any = _move
    (entries, _, heads, size), (batch, steps) = rows.shape, path.shape
    columns, block = heads * size, triton.next_power_of_2(steps)
    most = max(16, _MOVED // (block * rows.element_size()))
    wide = min(most, triton.next_power_of_2(columns))
    with torch.cuda.device(rows.device if rows.is_cuda else -1):
        move[(entries * batch, triton.cdiv(columns, wide))](
            rows, slots, path, steps, batch, rows.stride(0), columns,
            *slots.stride(), *path.stride(), STEPS=block, COLUMNS=wide, num_warps=4,
        )  # fmt: skip
