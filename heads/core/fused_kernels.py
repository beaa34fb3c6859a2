"""The Triton kernels of `fused`, `fused_norms`, `fused_angles` and `fused_writes`, one launch each.

Those modules define what they compute. All of them compute in float32 and round once. Last
dimensions are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import launching_on

_ELEMENTS = 1024  # that a program of an elementwise kernel takes


@triton.jit
def _normed(value, weight, along, ok, eps, width, kind: tl.constexpr):
    """A row [BLOCK] in float32 over its root mean square, rounded, times the weight."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + along, mask=ok, other=0.0).to(tl.float32)
    return ((value * scale).to(kind).to(tl.float32) * factor).to(kind)


@triton.jit
def _norm(states, weight, out, eps, width, BLOCK: tl.constexpr):
    row, along = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ok = along < width
    value = tl.load(states + row * width + along, mask=ok, other=0.0).to(tl.float32)
    found = _normed(value, weight, along, ok, eps, width, out.dtype.element_ty)
    tl.store(out + row * width + along, found, mask=ok)


@triton.jit
def _add_norm(states, others, weight, total, out, eps, width, BLOCK: tl.constexpr):
    row, along = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ok, at = along < width, row * width + along
    kind = out.dtype.element_ty
    value = tl.load(states + at, mask=ok, other=0.0).to(tl.float32)
    value = (value + tl.load(others + at, mask=ok, other=0.0).to(tl.float32)).to(kind)
    tl.store(total + at, value, mask=ok)
    found = _normed(value.to(tl.float32), weight, along, ok, eps, width, kind)
    tl.store(out + at, found, mask=ok)


@triton.jit
def _gated(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    left = tl.load(gate + at, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(up + at, mask=ok, other=0.0).to(tl.float32)
    found = left * tl.sigmoid(left) * right
    tl.store(out + at, found.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["nodes", "p_row"])
def _angles(
    positions, frequencies, scaling, cos, sin, nodes, half, p_row, p_node, HALF: tl.constexpr
):  # fmt: skip
    """Those of one token."""
    token, along = tl.program_id(0), tl.arange(0, HALF)
    row, node = (token // nodes).to(tl.int64), (token % nodes).to(tl.int64)
    ok = along < half
    position = tl.load(positions + row * p_row + node * p_node).to(tl.float32)
    angle = position * tl.load(frequencies + along, mask=ok, other=0.0).to(tl.float32)
    one = (tl.cos(angle) * scaling).to(cos.dtype.element_ty)
    other = (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    at = token.to(tl.int64) * 2 * half + along
    tl.store(cos + at, one, mask=ok)
    tl.store(cos + at + half, one, mask=ok)
    tl.store(sin + at, other, mask=ok)
    tl.store(sin + at + half, other, mask=ok)


@triton.jit(do_not_specialize=["nodes"])
def _turn(
    q, k, v, q_out, k_out, keys, values, slots, cos, sin, nodes, query_heads, heads, half, width_v,
    q_row, q_head, q_node, k_row, k_head, k_node, v_row, v_head, v_node, c_row, c_node, s_row,
    s_node, WRITE: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one token: the query's heads come first, then the key's, with the value's."""
    token, head, along = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    row, node = (token // nodes).to(tl.int64), (token % nodes).to(tl.int64)
    ok = along < half
    at = row * q_row + head * q_head + node * q_node
    read, there = q + at, q_out + at
    if head >= query_heads:
        at = row * k_row + (head - query_heads) * k_head + node * k_node
        read, there = k + at, k_out + at
    angle, other = cos + row * c_row + node * c_node, sin + row * s_row + node * s_node
    first = tl.load(read + along, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(read + half + along, mask=ok, other=0.0).to(tl.float32)
    cos_one = tl.load(angle + along, mask=ok, other=0.0).to(tl.float32)
    cos_two = tl.load(angle + half + along, mask=ok, other=0.0).to(tl.float32)
    sin_one = tl.load(other + along, mask=ok, other=0.0).to(tl.float32)
    sin_two = tl.load(other + half + along, mask=ok, other=0.0).to(tl.float32)
    kind = q_out.dtype.element_ty
    one = (first * cos_one - second * sin_one).to(kind)
    two = (second * cos_two + first * sin_two).to(kind)
    tl.store(there + along, one, mask=ok)
    tl.store(there + half + along, two, mask=ok)
    if WRITE:
        mine = head - query_heads
        if mine >= 0:
            entry = tl.load(slots + token) * heads + mine
            tl.store(keys + entry * 2 * half + along, one, mask=ok)
            tl.store(keys + entry * 2 * half + half + along, two, mask=ok)
            wide = tl.arange(0, WIDE)
            held = v + row * v_row + mine * v_head + node * v_node + wide
            value = tl.load(held, mask=wide < width_v, other=0.0)
            tl.store(values + entry * width_v + wide, value, mask=wide < width_v)


@triton.jit(do_not_specialize=["nodes"])
def _write(
    keys, values, slots, k, v, nodes, heads, width, width_v,
    k_row, k_head, k_node, v_row, v_head, v_node, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and value of one head of one token."""
    token, head, along = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    row, node = (token // nodes).to(tl.int64), (token % nodes).to(tl.int64)
    slot = tl.load(slots + token)
    ok, ok_v = along < width, along < width_v
    key = tl.load(k + row * k_row + head * k_head + node * k_node + along, mask=ok, other=0.0)
    value = tl.load(v + row * v_row + head * v_head + node * v_node + along, mask=ok_v, other=0.0)
    tl.store(keys + (slot * heads + head) * width + along, key, mask=ok)
    tl.store(values + (slot * heads + head) * width_v + along, value, mask=ok_v)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `fused_norms.rms_norm`."""
    kernel: Any = _norm
    states, width = states.contiguous(), states.shape[-1]
    out = torch.empty_like(states)
    with launching_on(states):
        block = triton.next_power_of_2(width)
        kernel[(states.numel() // width,)](states, weight, out, eps, width, BLOCK=block)
    return out


def add_norm(states: Tensor, others: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `fused_norms.add_norm`."""
    kernel: Any = _add_norm
    states, others, width = states.contiguous(), others.contiguous(), states.shape[-1]
    total, out = torch.empty_like(states), torch.empty_like(states)
    with launching_on(states):
        kernel[(states.numel() // width,)](
            states, others, weight, total, out, eps, width, BLOCK=triton.next_power_of_2(width)
        )
    return total, out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """See `fused.gated`."""
    kernel: Any = _gated
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    with launching_on(gate):
        programs = triton.cdiv(gate.numel(), _ELEMENTS)
        kernel[(programs,)](gate, up, out, gate.numel(), BLOCK=_ELEMENTS)
    return out


def angles(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `fused_angles.angles`."""
    kernel: Any = _angles
    (batch, nodes), half = positions.shape, len(frequencies)
    cos, sin = (positions.new_empty(batch, nodes, 2 * half, dtype=dtype) for _ in range(2))
    with launching_on(positions):
        kernel[(batch * nodes,)](
            positions, frequencies, scaling, cos, sin, nodes, half, *positions.stride(),
            HALF=triton.next_power_of_2(half),
        )  # fmt: skip
    return cos, sin


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    written: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fused_writes.rotate`; what is returned is laid out as what is given, without its gaps.

    Args:
        written: keys, values, slots and value of `fused_writes.rotate_and_write`, which is done
            then; keys and values are contiguous.
    """
    kernel: Any = _turn
    (batch, heads, nodes), half = query.shape[:3], query.shape[-1] // 2
    cos, sin = (angle.expand(batch, -1, -1) for angle in (cos, sin))
    found = torch.empty_like(query), torch.empty_like(key)
    query, key = (  # parts of one product have gaps between their rows
        each if each.stride() == out.stride() else each.clone()
        for each, out in zip((query, key), found, strict=True)
    )
    assert found[0].stride() == query.stride() and found[1].stride() == key.stride()
    keys, values, slots, value = written or (key, key, key, key)
    with launching_on(query):
        kernel[(batch * nodes, heads + key.shape[1])](
            query, key, value, *found, keys, values, slots, cos, sin, nodes, heads, key.shape[1],
            half, value.shape[-1], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *cos.stride()[:2], *sin.stride()[:2], WRITE=written is not None,
            HALF=triton.next_power_of_2(half), WIDE=triton.next_power_of_2(value.shape[-1]),
        )  # fmt: skip
    return found


def write(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """See `fused_writes.write`; keys and values are contiguous."""
    kernel: Any = _write
    (batch, heads, nodes, width), wide = key.shape, value.shape[-1]
    with launching_on(key):
        kernel[(batch * nodes, heads)](
            keys, values, slots, key, value, nodes, heads, width, wide,
            *key.stride()[:3], *value.stride()[:3],
            BLOCK=triton.next_power_of_2(max(width, wide)),
        )  # fmt: skip
