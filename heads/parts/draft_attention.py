"""Attention while a drafter's training continues every position of a text, several tokens deep.

Depth 1 runs on the text. Every further depth adds one key for each of W chosen positions, so its
query w sees of the T text keys those of its document up to its position, and of the W keys that
each depth added its own:

    keys          text             depth 2      depth 3
    query w       start … at       w            w

`depth_mask` makes that mask: dense for torch's own attention or, on a GPU, as blocks for
FlexAttention, which computes no block that is empty and never holds T² entries.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "headstart_flex"
"""Under which FlexAttention is registered."""

_BLOCK = 128
_LEAST_SIZE = 16  # of a head, for the kernel; zeros are added to what is smaller

Mask = Tensor | BlockMask


def depth_mask(
    at: Tensor,
    start: Tensor,
    length: int,
    added: int,
    flex: bool | None = None,
    past: int = 0,
) -> Mask:
    """What W queries a row see of T text keys and of the keys that `added` depths gave each.

    Args:
        at: [B, W] int64, the last text key that a query sees.
        start: [B, W], the first one.
        length: T.
        flex: whether as blocks; on a GPU when None.
        past: how many of the added depths, the first ones, no query sees.

    Returns:
        A `BlockMask`, or [B, 1, W, T + added · W] bool.

    >>> depth_mask(torch.tensor([[1, 2]]), torch.tensor([[0, 2]]), 3, 1, flex=False).int().tolist()
    [[[[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]]]
    """
    width = at.shape[1]

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= start[row, query]) & (key <= at[row, query])
        own = (key >= length + past * width) & ((key - length) % width == query)
        return text | own

    keys = length + added * width
    if flex is None:
        flex = at.device.type == "cuda"
    if flex:
        return _blocks(at, start, length, keys, seen)
    rows, queries, every = (torch.arange(n, device=at.device) for n in (len(at), width, keys))
    return seen(rows.view(-1, 1, 1), rows, queries.view(-1, 1), every).unsqueeze(1)


def _blocks(
    at: Tensor, start: Tensor, length: int, keys: int, seen: Callable[..., Tensor]
) -> BlockMask:
    """The blocks in which `seen` may be true, found from the ends of their rows and columns."""
    width, device = at.shape[1], at.device
    short = -width % _BLOCK
    last = nn.functional.pad(at, (0, short), value=-1).unflatten(1, (-1, _BLOCK)).amax(2)
    far = nn.functional.pad(start, (0, short), value=keys).unflatten(1, (-1, _BLOCK)).amin(2)
    first_query = torch.arange(last.shape[1], device=device).mul(_BLOCK).unsqueeze(1)  # [Qb, 1]
    last_query = (first_query + _BLOCK).clamp(max=width) - 1
    first_key = torch.arange(0, keys, _BLOCK, device=device)  # [Kb]
    last_key = (first_key + _BLOCK).clamp(max=keys) - 1
    text = (first_key <= last.unsqueeze(-1)) & (last_key >= far.unsqueeze(-1))  # [B, Qb, Kb]
    own = torch.zeros(len(first_query), len(first_key), dtype=torch.bool, device=device)
    for begin in range(length, keys, width):
        own |= (first_key <= begin + last_query) & (last_key >= begin + first_query)
    some = (text | own).unsqueeze(1)  # [B, 1, Qb, Kb]
    order = some.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        some.sum(-1).int(), order.int(), BLOCK_SIZE=_BLOCK, mask_mod=seen,
        seq_lengths=(width, keys),
    )  # fmt: skip


@contextmanager
def attention_for(model: PreTrainedModel, mask: Mask | dict[str, Mask] | None) -> Iterator[None]:
    """For one forward, a model's layers attend in the way that the mask is made for.

    Masks may be given for each type of layer.
    """
    config: Any = model.config
    own = config._attn_implementation
    if any(isinstance(m, BlockMask) for m in (mask.values() if isinstance(mask, dict) else [mask])):
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What the layers call: query [B, Hq, W, D], key and value [B, Hkv, S, D]."""
    attend, size = _compiled() if query.is_cuda else flex_attention, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (short := _LEAST_SIZE - query.shape[-1]) > 0:
        query, key, value = (nn.functional.pad(x, (0, short)) for x in (query, key, value))
    found: Any = attend(
        query, key, value, block_mask=attention_mask, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found[..., :size].transpose(1, 2).contiguous(), None


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


AttentionInterface.register(NAME, _attention)
