"""Attention of few query rows on a CPU, in torch's own operator, without its slow cases.

Two things cost most of a round's attention there. transformers repeats keys and values for each
query head that shares them: here the queries of a group stand below one another instead, as rows
that read the same keys. And products of a single row in 16 bits are several times as slow as those
of two: a lone row is computed in float32. Where `cpu_kernels` has a kernel, it attends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from . import cpu_kernels

_OTHERS = ("softcap", "position_bias", "cache", "s_aux", "sinks")
"""What else models hand to their attention: theirs is then used."""


class _Forward(threading.local):
    """What the forward that a thread runs now has prepared for all layers.

    Attributes:
        masks: repeated ones, by the id of what they were made of; None outside of such a forward.
    """

    def __init__(self) -> None:
        self.masks: dict[int, tuple[Tensor, Tensor]] | None = None


_now = _Forward()


@contextmanager
def few_rows() -> Iterator[None]:
    """In this thread, for one forward, layers that attend as `sdpa` do so by this file."""
    before, _now.masks = _now.masks, {}
    try:
        yield
    finally:
        _now.masks = before


def attends_in_few_rows() -> bool:
    """Whether the forward that this thread runs now does."""
    return _now.masks is not None


def attention(
    own: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Any:
    """What models call: query [B, Hq, N, D], key and value [B, Hkv, S, D], to [B, N, Hq, Dv].

    Args:
        own: transformers' attention, for what is beyond this one.
        attention_mask: [B, 1, N, S], added to the scores; None where a single row sees all.
    """
    batch, query_heads, nodes, size = query.shape
    heads, mask = key.shape[1], attention_mask
    known = not dropout and all(options.get(name) is None for name in _OTHERS)
    shaped = nodes == 1 if mask is None else mask.dim() == 4 and mask.shape[1] == 1
    if known and shaped:
        ours = cpu_kernels.attend(query, key, value, mask, scaling)
        if ours is not None:
            return ours, None
    group, dtype = query_heads // heads, query.dtype
    lone = group * nodes == 1 and dtype.itemsize == 2
    slow = group > 1 or lone
    if not (known and shaped and slow):
        given = {"scaling": scaling, "dropout": dropout, **options}
        return own(module, query, key, value, mask, **given)
    rows = query.reshape(batch, heads, group * nodes, size)
    if mask is not None and group > 1:
        mask = _repeated(mask, group)
    if lone:
        rows, key, value = rows.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    found = F.scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
    found = found.to(dtype).reshape(batch, query_heads, nodes, -1)
    return found.transpose(1, 2).contiguous(), None


def _repeated(mask: Tensor, group: int) -> Tensor:
    """A mask [B, 1, N, S] for each query head of a group: [B, 1, group·N, S], made once."""
    masks = _now.masks
    assert masks is not None
    if id(mask) not in masks:
        masks[id(mask)] = mask, mask.repeat(1, 1, group, 1)
    return masks[id(mask)][1]
