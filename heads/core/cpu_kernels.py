"""Forwards of few rows on a CPU, by kernels of our own that read weights once.

Decoding few rows is bound by memory, and neither torch's products nor those on weights packed for
oneDNN read it as fast as a core can. `cpu_kernels.c` does, from weights as they are, in no second
copy. It needs a C compiler, see `cpu_compile`; without one layers are packed for oneDNN, as other
types are.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .cpu_compile import TYPES, Attention, kernels

MOST_ROWS = 64
"""Rows that a kernel takes; more are no longer bound by memory."""

_MOST_QUERIES = 64
"""Rows of queries of a head for which attention is ours."""

_PRODUCTS = struct.Struct("18q")  # what the kernel is given, see `cpu_kernels.c`

_HUGE = 2 << 20  # bytes of a huge page
_HUGE_LATER, _COLLAPSE = 14, 25  # Linux's numbers of MADV_HUGEPAGE and MADV_COLLAPSE


def fits_kernels(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is torch's own, and one that the kernels compute."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    return _fits(layer) and kernels(layer.weight.dtype) is not None


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    if weight.dtype not in TYPES or not weight.is_cpu or not weight.is_contiguous():
        return False
    return layer.in_features % 32 == 0 and layer.out_features % 16 == 0


class CpuLinear(nn.Linear):
    """A linear layer that few rows pass through the kernels; all else is torch's own.

    Args:
        layer: that `fits_kernels` is true of; its weight and bias are shared.
    """

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.training = layer.training

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not together([self], input):
            return super().forward(input)
        return products([self], input)[0]


def together(layers: Sequence[Any], states: Tensor) -> bool:
    """Whether the kernels compute what layers make of states [..., in], at once."""
    size, dtype = states.shape[-1], states.dtype
    rows = states.numel() // size if size else 0
    if not 0 < rows <= MOST_ROWS or not states.is_cpu:
        return False
    learns = torch.is_grad_enabled()
    for layer in layers:
        # It may have been moved, recast, or given a hook since.
        if type(layer) is not CpuLinear or layer.in_features != size:
            return False
        weight: Any = layer._parameters["weight"]  # found at once
        if weight.dtype != dtype or not weight.is_cpu or not weight.is_contiguous():
            return False
        if learns and (states.requires_grad or weight.requires_grad):
            return False
    if len(layers) > 1 and any(e._forward_hooks or e._forward_pre_hooks for e in layers):
        return False
    return kernels(dtype) is not None


def products(layers: Sequence[nn.Linear], states: Tensor) -> list[Tensor]:
    """What up to three layers make of the same states [..., in]: [..., out] each."""
    return _products(layers, states, [layer.out_features for layer in layers], False)


def each_product(states: Tensor, weights: Tensor) -> Tensor | None:
    """States [K, M, in] by weights [K, out, in] of their own: [K, M, out]; None where none fits."""
    count, rows, size = states.shape
    outputs, states = weights.shape[1], states.contiguous()
    shaped = 0 < rows <= MOST_ROWS and size % 32 == 0 and outputs % 16 == 0
    if not shaped or not plain(states, weights):
        return None
    found = states.new_empty(count, rows, outputs)
    kernels(states.dtype).each_product(
        states.data_ptr(), weights.data_ptr(), found.data_ptr(), count, rows, size, outputs,
        torch.get_num_threads(),
    )  # fmt: skip
    return found


def gated(gate: nn.Linear, up: nn.Linear, states: Tensor) -> Tensor:
    """SiLU(gate) · up of states [..., in], elementwise."""
    return _products((gate, up), states, [gate.out_features], True)[0]


def _products(
    layers: Sequence[nn.Linear], states: Tensor, sizes: Sequence[int], gated: bool
) -> list[Tensor]:
    states = states.contiguous()
    shape, size = states.shape[:-1], states.shape[-1]
    found = [states.new_empty(*shape, each) for each in sizes]
    given = [states.data_ptr(), states.numel() // size, size, torch.get_num_threads()]
    given += [gated, len(layers)]
    for number, layer in enumerate(layers):
        weight: Any = layer._parameters["weight"]
        bias = 0 if layer.bias is None else layer.bias.data_ptr()
        out = found[number].data_ptr() if number < len(found) else 0
        given += [weight.data_ptr(), bias, out, layer.out_features]
    given += [0, 0, 0, 0] * (3 - len(layers))
    kernels(states.dtype).products(_PRODUCTS.pack(*given))
    return found


def plain(*tensors: Tensor) -> bool:
    """Whether there are kernels of the tensors' one type, which are in order and not learned."""
    learns = torch.is_grad_enabled()
    dtype = tensors[0].dtype
    for each in tensors:
        if each.dtype != dtype or not each.is_cpu or not each.is_contiguous():
            return False
        if learns and each.requires_grad:
            return False
    return dtype in TYPES and kernels(dtype) is not None


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Llama's norm of states [..., D] by weight [D]; None where the kernel does not fit."""
    size = states.shape[-1]
    if size % 16 or not 0 < states.numel() <= MOST_ROWS * size or not plain(states, weight):
        return None
    found = torch.empty_like(states)
    rows = states.numel() // size
    kernels(states.dtype).norm(
        states.data_ptr(), weight.data_ptr(), found.data_ptr(), rows, size, eps
    )
    return found


def rotate(states: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor] | None:
    """The rotary embedding of each of states [B, H, N, D] by cos and sin [B, N, D]; None as above.

    Heads of a token stand behind one another in memory, [B, N, H, D], as projections give them.
    """
    rows = [each.transpose(1, 2) for each in states]
    size = cos.shape[-1]
    nodes = cos.numel() // size
    if size % 32 or not 0 < nodes <= MOST_ROWS or not plain(cos, sin, *rows):
        return None
    if any(each.shape[:2] != cos.shape[:2] or each.shape[-1] != size for each in rows):
        return None
    found = [torch.empty_like(each) for each in rows]
    for each, out in zip(rows, found, strict=True):
        kernels(cos.dtype).rotate(
            each.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), nodes, each.shape[2],
            size,
        )  # fmt: skip
    return [each.transpose(1, 2) for each in found]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """Attention of query [B, Hq, N, D] to key and value [B, Hkv, S, D]: [B, N, Hq, Dv]; or None.

    Args:
        mask: [B or 1, 1, N, S], added to the scores.
    """
    batch, query_heads, nodes, size = query.shape
    heads, slots, wide = key.shape[1], key.shape[2], value.shape[-1]
    group = query_heads // heads
    if group * nodes > _MOST_QUERIES or size % 32 or wide % 32 or not slots:
        return None
    rows = query.transpose(1, 2)
    rows = rows if rows.is_contiguous() else rows.contiguous()
    if not plain(rows) or key.requires_grad or value.requires_grad:
        return None
    given = (key, value) if mask is None else (key, value, mask)
    if any(e.dtype != query.dtype or not e.is_cpu or e.stride(-1) != 1 for e in given):
        return None
    found = rows.new_empty(batch, nodes, query_heads, wide)
    now = attention_of(query.shape, key, value, mask, scale)
    now.query, now.out = rows.data_ptr(), found.data_ptr()
    kernels(query.dtype).attend(now, torch.get_num_threads())
    return found


def attention_of(
    shape: Sequence[int], key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Attention:
    """Where keys, values and mask stand, for a query of this shape; the rest as of `attend`."""
    batch, query_heads, nodes, size = shape
    heads, slots = key.shape[1], key.shape[2]
    sizes = batch, nodes, heads, query_heads // heads, slots, size, value.shape[-1]
    pointer, hidden = None, (0, 0)
    if mask is not None:
        pointer = mask.data_ptr()
        hidden = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
    steps = key.stride()[:3], value.stride()[:3], hidden
    scale = size**-0.5 if scale is None else scale
    return Attention(None, key.data_ptr(), value.data_ptr(), pointer, None, *sizes, *steps, scale)


def move_path(rows: Tensor, slots: Tensor | range, path: Tensor) -> bool:
    """See `cache.plain_move`; False, with nothing done, where no kernel fits.

    Args:
        slots: also the range of slots that each of B rows wrote.
    """
    (batch, steps), (entries, places) = path.shape, rows.shape[:2]
    whole = all(each.is_cpu and each.is_contiguous() for each in (rows, path))
    if not whole or rows.dtype not in TYPES or (library := kernels(rows.dtype)) is None:
        return False
    flat, first, nodes = None, 0, len(slots)
    if isinstance(slots, Tensor):
        slots = slots.contiguous()
        flat, nodes = slots.data_ptr(), slots.shape[1]
    else:
        first = slots.start
    size = rows.stride(1) * rows.itemsize  # of a place
    library.move_path(
        rows.data_ptr(), entries, places // batch, size, flat, first, nodes, path.data_ptr(), batch,
        steps,
    )  # fmt: skip
    return True


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Have the system keep tensors in pages of 2 MB, where it can: reading them is faster.

    At each page of 4 KB a core waits for where the next one is. Nothing of the tensors changes, nor
    their addresses; a mapped file's pages stay what they are.
    """
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    pages = {page for first, end in spans for page in range(first // _HUGE, -(-end // _HUGE))}
    for page in sorted(pages):
        # Linux makes a page of memory of one advice only, and `in_huge_pages` gives it to parts.
        _advise(page * _HUGE, _HUGE, _HUGE_LATER)
        _advise(page * _HUGE, _HUGE, _COLLAPSE)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy, written to pages of 2 MB at once; at its ends `use_huge_pages` makes some later."""
    made, page = torch.empty_like(tensor), mmap.PAGESIZE
    first, end = -(-made.data_ptr() // page), (made.data_ptr() + made.nbytes) // page
    if end > first:
        _advise(first * page, (end - first) * page, _HUGE_LATER)
    return made.copy_(tensor)


def _advise(address: int, size: int, advice: int) -> None:
    """Tell Linux how memory is to be kept, which it may not heed."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(address, size, advice)
