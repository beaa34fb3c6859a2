"""The Triton kernels: tree attention, and moving an accepted path within the cache.

`tree_attention` and `cache.plain_move` define what they compute. Attention is split-KV, as in
Flash-Decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html): a first kernel
attends to one part of the keys in each program and writes a partial output with its log-sum-exp, a
second merges the parts.

What a layer of Llama-3-8B reads and writes in GPU memory, in bfloat16 (8 heads of keys and values,
groups of 4, head dimension 128), for a prefix of 8,192 tokens and a tree of 64 nodes:

- Keys and values: 2 × 8 × 8,192 × 128 × 2 bytes = 33.6 MB, the least possible. Masked sdpa repeats
  them for each query head: nine times as much. Here a group's queries are rows of one product with
  the keys that they share, 4 × 64 = 256 rows, cut into tiles of 64. A head's tiles are next to each
  other in the grid, so they run at the same time and share the L2 cache.
- 8 heads × 4 tiles are 32 programs, and 8 parts of the slots make 256 of them, two for each of an
  H100's 132 multiprocessors. Each writes its rows in float32: 8 × 32 × 64 × 128 × 4 bytes = 8.4 MB.
- The packed tree is 64 × 66 × 4 bytes = 17 kB; an additive mask is 1.1 MB for each query head.

256 rows take 256 operations for each byte read; near the GPU's ratio (some 300 on an H100) the time
is bound by arithmetic. So slots that every row sees, which are nearly all, take no masks. The
blocks of the prefix and then of the tree are divided evenly among the parts; where the prefix ends
is read on the device: the launch is the same for texts of any length, as a captured CUDA graph
needs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_WARPS = 8
"""For how many warps of each multiprocessor the splits give work: for more, more parts are merged.
That many keep their registers whatever the tile."""
_MAX_SPLITS = 64
_SHARED = 96 * 1024
"""Bytes that a program may keep in shared memory, where more is not known to be there; every GPU
since Ampere has 99 kB."""
_LARGE = 200 * 1024
"""Where a program may have so much shared memory, heads of up to 128 numbers use it for larger
blocks alone, as was measured on an H200."""
_MOVED = 8 * 1024
"""Bytes of a path that a program moves at once: sixteen registers of each thread of four warps."""


class Tile(NamedTuple):
    """How the work is cut: rows of queries and slots of keys a step, warps, and pipeline stages of
    the loops over slots that all rows see, and over `others`."""

    rows: int
    slots: int
    warps: int = 4
    stages: int = 2
    others: int = 1

    def __repr__(self) -> str:
        return f"Tile({', '.join(map(str, self))})"

    @classmethod
    def fit(cls, rows: int, key: int, value: int, itemsize: int, shared: int = _SHARED) -> Tile:
        """For so many rows a head, head dimensions and bytes a number.

        Each warp multiplies 16 rows, or all rows with columns of its own: with more warps, some
        would compute the same. In shared memory are the queries, and the keys and values of each
        stage, less one where the products read registers. Numbers of 32 bits, of which a thread
        holds more, take smaller tiles, and two stages.

        Args:
            shared: bytes of shared memory that a program may have.

        >>> Tile.fit(4, 128, 128, 2), Tile.fit(64, 128, 128, 2)
        (Tile(16, 64, 4, 3, 3), Tile(64, 32, 4, 3, 3))
        >>> Tile.fit(256, 128, 128, 2, 227 << 10), Tile.fit(512, 128, 128, 2, 227 << 10)
        (Tile(64, 64, 4, 3, 1), Tile(128, 64, 8, 3, 1))
        >>> Tile.fit(256, 128, 128, 4)
        Tile(32, 16, 8, 2, 2)
        """
        width = (_block(key) + _block(value)) * itemsize
        wide = itemsize > 2
        most = 16 if width > 1024 else 32 if width > 512 else 64 if wide or rows <= 256 else 128
        rows = max(16, min(most, triton.next_power_of_2(rows)))
        if wide:
            room = (_SHARED - rows * _block(key) * itemsize) // (2 * width + 4 * rows)
            slots = max(16, min(64, 1 << room.bit_length() - 1, (1 << 14) // width))
            return cls(rows, slots, 8 if rows > 16 and rows * _block(value) >= 1 << 12 else 4, 2, 2)
        warps = max(4, rows // 16)
        # A multiprocessor's memory, where it is large, is shared by programs of `_WARPS` together.
        most, queries = max(_SHARED, shared * warps // _WARPS), rows * _block(key) * itemsize
        for stages in (3, 2):
            buffers = stages if rows >= 64 else stages - 1
            slots = min(64, 1 << ((most - queries) // (buffers * width)).bit_length() - 1)
            if slots >= 32:
                break
        # Stages spare registers, and keep what each node sees in shared memory.
        left = _SHARED - queries - buffers * slots * width
        staged = shared < _LARGE or width > 512
        others = stages if staged and left >= stages * 4 * rows * slots else 1
        return cls(rows, slots, warps, stages, others)


def launching_on(tensor: Tensor) -> Any:
    """A context for launches on a tensor's GPU, which need not be the current one; on the CPU,
    where kernels are interpreted, it does nothing."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@triton.jit
def _absorb(
    query, keys, values, seen, scale, softcap, top, total, output,
    ok_slots, ok_key, ok_value, CAPPED: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Attend to one block of slots: the running maximum, total and output of each row, after it.

    `scale` makes powers of two of scores. `WHOLE`: each row sees all of these slots; `EVEN`: heads
    have as many numbers as are read.
    """
    if WHOLE and EVEN:
        key = tl.load(keys)  # [D, slots]
    elif WHOLE:
        key = tl.load(keys, mask=ok_key[:, None], other=0.0)
    else:
        key = tl.load(keys, mask=ok_key[:, None] & ok_slots[None, :], other=0.0)
    score = tl.dot(query, key, input_precision="ieee")
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score * scale / softcap) - 1.0)  # tanh
        scale = 1.4426950408889634
    if not WHOLE:
        score = tl.where(seen, score, float("-inf"))
    above = tl.maximum(top, tl.max(score, 1) * scale)  # type: ignore[operator]
    base = above if WHOLE else tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(score * scale - base[:, None])
    fade = tl.exp2(top - base)
    if WHOLE and EVEN:
        value = tl.load(values)  # [slots, Dv]
    elif WHOLE:
        value = tl.load(values, mask=ok_value[None, :], other=0.0)
    else:
        value = tl.load(values, mask=ok_slots[:, None] & ok_value[None, :], other=0.0)
    output = tl.dot(weight.to(value.dtype), value, output * fade[:, None], input_precision="ieee")
    return above, total * fade + tl.sum(weight, 1), output


@triton.jit(do_not_specialize=["nodes", "tree", "p_row", "p_node"])
def _attend(
    q, k, v, packed, partial, lse, scale, softcap,
    heads, groups, nodes, tree,
    q_row, q_head, q_node, k_row, k_head, k_slot, v_row, v_head, v_slot, p_row, p_node,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, OTHERS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A tile of one head's rows over one part of the blocks of slots: the prefix's, then the
    tree's.

    Row r of a head is node r % N of its query r // N. Partial outputs are [P, B, Hq, N, Dv].
    """
    EVEN: tl.constexpr = D == D_BLOCK and DV == DV_BLOCK
    tile, pair, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (pair // heads).to(tl.int64), pair % heads
    rows = tile * ROWS + tl.arange(0, ROWS)
    ok = rows < groups * nodes
    query_head, node = head * groups + rows // nodes, rows % nodes
    along, along_v, step = tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK), tl.arange(0, SLOTS)
    ok_key, ok_value = along < D, along_v < DV

    sight, in_sight = packed + row * p_row, node * p_node
    end = tl.load(sight + 1)
    first = tl.load(
        sight + in_sight, mask=ok, other=2147483647
    )  # [ROWS], the oldest slot that a node sees
    at = q + row * q_row + query_head * q_head + node * q_node
    query = tl.load(at[:, None] + along[None, :], mask=ok[:, None] & ok_key[None, :], other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DV_BLOCK], tl.float32)
    keys, values = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    in_keys = along[:, None] + step[None, :] * k_slot
    in_values = step[:, None] * v_slot + along_v[None, :]

    oldest = tl.min(first, 0) // SLOTS * SLOTS
    blocks = tl.cdiv(tl.maximum(end - oldest, 0), SLOTS)
    each = tl.cdiv(blocks + tl.cdiv(tree, SLOTS), tl.num_programs(2))
    low = oldest + tl.minimum(part * each, blocks) * SLOTS
    high = tl.minimum(oldest + tl.minimum((part + 1) * each, blocks) * SLOTS, end)

    # Blocks that every row sees in full need no mask.
    newest = tl.max(tl.where(ok, first, 0), 0)
    ahead = tl.cdiv(tl.minimum(tl.maximum(newest, low), tl.maximum(high, low)) - low, SLOTS)
    start_whole = low + ahead * SLOTS
    whole = tl.maximum(high - start_whole, 0) // SLOTS
    end_whole = start_whole + whole * SLOTS
    keys_at = keys + start_whole.to(tl.int64) * k_slot
    values_at = values + start_whole.to(tl.int64) * v_slot
    for _ in range(whole):
        top, total, output = _absorb(
            query, keys_at + in_keys, values_at + in_values, ok, scale, softcap,
            top, total, output, ok, ok_key, ok_value, CAPPED, True, EVEN,  # type: ignore
        )  # fmt: skip
        keys_at += SLOTS * k_slot
        values_at += SLOTS * v_slot
    for edge in tl.range(ahead + (end_whole < high), num_stages=OTHERS):  # type: ignore
        start = tl.where(edge < ahead, low + edge * SLOTS, end_whole)
        slots = start + step
        seen = (slots < high)[None, :] & (slots[None, :] >= first[:, None])
        keys_at = keys + start.to(tl.int64) * k_slot
        values_at = values + start.to(tl.int64) * v_slot
        top, total, output = _absorb(
            query, keys_at + in_keys, values_at + in_values, seen, scale, softcap,
            top, total, output, slots < high, ok_key, ok_value, CAPPED, False, EVEN,  # type: ignore
        )  # fmt: skip
    before = tl.maximum(part * each - blocks, 0) * SLOTS
    after = tl.minimum(((part + 1) * each - blocks) * SLOTS, tree)
    keys_at = keys + (end + before).to(tl.int64) * k_slot
    values_at = values + (end + before).to(tl.int64) * v_slot
    for start in tl.range(before, after, SLOTS, num_stages=OTHERS):  # type: ignore
        others = start + step
        inside = others < tree
        bits = sight + 2 + (in_sight[:, None] + others[None, :])
        seen = tl.load(bits, mask=ok[:, None] & inside[None, :], other=0) != 0
        top, total, output = _absorb(
            query, keys_at + in_keys, values_at + in_values, seen, scale, softcap,
            top, total, output, inside, ok_key, ok_value, CAPPED, False, EVEN,  # type: ignore
        )  # fmt: skip
        keys_at += SLOTS * k_slot
        values_at += SLOTS * v_slot

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    place = ((part * tl.num_programs(1) + pair).to(tl.int64) * groups) * nodes + rows
    tl.store(lse + place, top + tl.log2(total), mask=ok)
    there = partial + place[:, None] * DV + along_v[None, :]
    tl.store(there, output, mask=ok[:, None] & ok_value[None, :])


@triton.jit(do_not_specialize=["nodes", "parts", "count"])
def _merge(
    partial, lse, out, query_heads, nodes, parts, count,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row's parts, weighted by their share of the total; out is [B, N, Hq, Dv]."""
    place = tl.program_id(0).to(tl.int64)  # in [B, Hq, N]
    part, along = tl.arange(0, PARTS), tl.arange(0, DV_BLOCK)
    ok, ok_value = part < parts, along < DV
    at = part.to(tl.int64) * count + place
    sums = tl.load(lse + at, mask=ok, other=float("-inf"))
    weight = tl.exp2(sums - tl.max(sums, 0))
    there = partial + at[:, None] * DV + along[None, :]
    outputs = tl.load(there, mask=ok[:, None] & ok_value[None, :], other=0.0)
    merged = tl.sum(outputs * weight[:, None], 0) / tl.sum(weight, 0)  # type: ignore[operator]
    node, above = place % nodes, place // nodes
    row, head = above // query_heads, above % query_heads
    at = ((row * nodes + node) * query_heads + head) * DV
    tl.store(out + at + along, merged.to(out.dtype.element_ty), mask=ok_value)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    scaling: float,
    softcap: float | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`tree_attention` as a kernel; the last dimension of each tensor is contiguous.

    The launch depends on the shapes alone, of which `key` may be all of the cache's slots. A first
    call compiles: make one before a CUDA graph is captured.

    Args:
        scaling: of the scores; above 0.
        splits: programs that share the slots; what fills the GPU when None.
        tile: how the work is cut; `Tile.fit` when None.
    """
    assert scaling > 0, scaling  # the best score is found before it is scaled
    attend: Any = _attend  # a kernel is called with its grid in brackets
    merge: Any = _merge
    batch, query_heads, nodes, size = query.shape
    heads, width, tree = key.shape[1], value.shape[-1], packed.shape[-1] - 2
    groups = query_heads // heads
    query, packed = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, packed))
    if tile is None:
        shared = shared_memory(query.device)
        tile = Tile.fit(groups * nodes, size, width, key.element_size(), shared)
    tiles = triton.cdiv(groups * nodes, tile.rows)
    if splits is None:
        # No more programs than there are places for.
        places = processors(query.device) * _WARPS // tile.warps
        wanted = places // (tiles * batch * heads)
        splits = max(1, min(wanted, triton.cdiv(key.shape[2], tile.slots), _MAX_SPLITS))
    count = batch * query_heads * nodes
    partial = torch.empty(splits, count, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, count, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, nodes, query_heads, width, dtype=query.dtype, device=query.device)
    with launching_on(query):
        attend[(tiles, batch * heads, splits)](
            query, key, value, packed, partial, lse,
            scaling * (math.log2(math.e) if softcap is None else 1.0), softcap or 0.0,
            heads, groups, nodes, tree,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            packed.stride(0), packed.stride(2),
            D=size, DV=width, D_BLOCK=_block(size), DV_BLOCK=_block(width),
            ROWS=tile.rows, SLOTS=tile.slots, OTHERS=tile.others, CAPPED=softcap is not None,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        merge[(count,)](
            partial, lse, out, query_heads, nodes, splits, count,
            DV=width, DV_BLOCK=_block(width), PARTS=triton.next_power_of_2(splits),
            num_warps=1 if splits <= 16 else 2,
        )  # fmt: skip
    return out


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for the CPU, where only the interpreter runs."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a GPU; the least on the CPU."""
    if device.type != "cuda":
        return _SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit(do_not_specialize=["steps", "batch", "a_row", "p_row"])
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
    """`cache.plain_move` as a kernel, in one launch; `rows` is contiguous."""
    move: Any = _move
    (entries, _, heads, size), (batch, steps) = rows.shape, path.shape
    columns, block = heads * size, triton.next_power_of_2(steps)
    most = max(16, _MOVED // (block * rows.element_size()))
    wide = min(most, triton.next_power_of_2(columns))
    with launching_on(rows):
        move[(entries * batch, triton.cdiv(columns, wide))](
            rows, slots, path, steps, batch, rows.stride(0), columns,
            *slots.stride(), *path.stride(), STEPS=block, COLUMNS=wide, num_warps=4,
        )  # fmt: skip
