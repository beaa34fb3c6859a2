"""Attention while a drafter's training continues every position of a text, several tokens deep.

Depth 1 runs on the text. Every further depth adds one key for each of W chosen positions, so its
query w sees of the T text keys those of its document up to its position, and of the W keys that
each depth added its own:

    keys          text             depth 2      depth 3
    query w       start … at       w            w

`depth_mask` makes that mask. A drafter of whole blocks runs all of them at once, A blocks of W
places each, whose queries see the text up to the block's own position, and the block:

    keys          text             blocks
    query a, w    start … at       a, every place or those up to w

`block_mask` makes that one. Where the text's queries run in the same pass, and blocks of different
lengths come after it, `text_and_block_mask` does. All are dense for torch's own attention or, on a
GPU, blocks for FlexAttention, which computes none that is empty and never holds T² entries.
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
_COMPILED = 64  # times at most, of the same code
_LEAST_SIZE = 16  # of a head, for the kernel; zeros are added to what is smaller

Mask = Tensor | BlockMask


def chosen_positions(where: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of each row that drafts start from, and where their documents begin.

    Args:
        where, positions: as in `TrainableDrafter.draft_hidden_states`.

    Returns:
        at: [B, W] int64, W those of the row with the most; others follow in a row with fewer.
        positions: [B, T], as given or, where they are None, of one document a row.
        begin: [B, T], the place in its row where each position's document begins.
    """
    most = max(int(where.sum(1).max()), 1)
    at = where.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    every = torch.arange(where.shape[1], device=where.device).expand_as(where)
    positions = every if positions is None else positions
    return at, positions, every - positions


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
    first_added = length + past * width

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= start[row, query]) & (key <= at[row, query])
        own = (key >= first_added) & ((key - length) % width == query)
        return text | own

    def own(first: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(first + length + n * width, last + length + n * width) for n in range(added)]

    return _mask(at, start, length + added * width, seen, own, flex)


def block_mask(
    at: Tensor,
    start: Tensor,
    length: int,
    places: int,
    causal: bool,
    window: int | None = None,
    flex: bool | None = None,
) -> Mask:
    """What the A · W queries of A blocks a row see of T text keys and of the blocks' own keys.

    Args:
        at: [B, A] int64, the last text key that a block sees.
        start: [B, A], the first one.
        length: T.
        places: W.
        causal: whether a place sees those of its block up to itself alone.
        window: of how many positions a place sees those before it, itself included, and those after
            it; None: all.
        flex: whether as blocks; on a GPU when None.

    Returns:
        A `BlockMask`, or [B, 1, A · W, T + A · W] bool.

    >>> at, start = torch.tensor([[0, 1]]), torch.tensor([[0, 0]])
    >>> block_mask(at, start, 2, 2, causal=True, flex=False).int().tolist()[0][0]
    [[1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    """
    at, start = (x.repeat_interleave(places, 1) for x in (at, start))  # [B, A · W]
    near = places if window is None else min(window, places)
    if window is not None:  # a block's first place is one after the last text key
        place = torch.arange(at.shape[1], device=at.device) % places
        start = start.maximum(at + place - (window - 2))
    least, most = 1 - near, 0 if causal else near - 1  # places ahead

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= start[row, query]) & (key <= at[row, query])
        ahead = key - length - query
        own = (key >= length) & ((key - length) // places == query // places)
        return text | (own & (ahead >= least) & (ahead <= most))

    def own(first: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        whole = last if causal else last // places * places + places - 1
        return [(first // places * places + length, whole + length)]

    return _mask(at, start, length + at.shape[1], seen, own, flex)


def text_and_block_mask(
    at: Tensor,
    start: Tensor,
    block: Tensor,
    length: int,
    longest: int,
    window: int | None = None,
    flex: bool | None = None,
) -> Mask:
    """What S queries a row see of their own keys: a text of T and, after it, causal blocks.

    Args:
        at: [B, S] int64, the last text key that a query sees; a query of the text its own.
        start: [B, S], the first one.
        block: [B, S], a number of each query's block, whose queries stand side by side.
        length: T.
        longest: of how many queries a block is at most.
        window: of how many keys a query sees those of its block, itself included; None: all.
        flex: whether as blocks; on a GPU when None.

    Returns:
        A `BlockMask`, or [B, 1, S, S] bool.

    >>> at, start = torch.tensor([[0, 1, 0, 0, 1]]), torch.zeros(1, 5, dtype=torch.long)
    >>> block = torch.tensor([[0, 0, 1, 1, 2]])
    >>> text_and_block_mask(at, start, block, 2, 2, flex=False).int().tolist()[0][0]
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]
    """
    near = longest if window is None else min(longest, window)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= start[row, query]) & (key <= at[row, query])
        own = (key >= length) & (key <= query) & (query - key < near)
        return text | (own & (block[row, key] == block[row, query]))

    def own(first: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [((first - near + 1).clamp(min=length), last)]

    return _mask(at, start, at.shape[1], seen, own, flex)


Ranges = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]


def _mask(
    at: Tensor,
    start: Tensor,
    keys: int,
    seen: Callable[..., Tensor],
    own: Ranges,
    flex: bool | None,
) -> Mask:
    """The mask of queries that see the text's keys start … at, [B, Q] each, and some others.

    Args:
        keys: how many there are in all.
        seen: (row, head, query, key) -> whether it is seen. It computes with tensors and numbers
            that are there before it is called: torch 2.11 compiles no other numbers on a GPU.
        own: the first and last of some queries -> the ranges of keys, beside the text's, that hold
            all which these see.
    """
    if flex is None:
        flex = at.device.type == "cuda"
    if flex:
        return _blocks(at, start, keys, seen, own)
    count = len(at), at.shape[1], keys
    rows, queries, every = (torch.arange(n, device=at.device) for n in count)
    return seen(rows.view(-1, 1, 1), rows, queries.view(-1, 1), every).unsqueeze(1)


def _blocks(
    at: Tensor, start: Tensor, keys: int, seen: Callable[..., Tensor], own: Ranges
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
    some = (first_key <= last.unsqueeze(-1)) & (last_key >= far.unsqueeze(-1))  # [B, Qb, Kb]
    for first, end in own(first_query, last_query):
        some |= (first_key <= end) & (last_key >= first)
    some = some.unsqueeze(1)  # [B, 1, Qb, Kb]
    order = some.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        some.sum(-1).int(), order.int(), BLOCK_SIZE=_BLOCK, mask_mod=seen,
        seq_lengths=(width, keys),
    )  # fmt: skip


def knows_flex(model: PreTrainedModel) -> bool:
    """Whether FlexAttention, as it is called here, computes what a model's layers do."""
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return not capped and not any("sink" in name for name, _ in model.named_parameters())


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
    """FlexAttention, compiled for what it meets: with gradients and without, for one row, for few
    keys, … Torch stops at eight of these, and goes on with all scores of a layer in memory."""
    from torch._dynamo import config

    compiled = torch.compile(flex_attention)

    def attend(*given: Any, **options: Any) -> Any:
        with config.patch(recompile_limit=_COMPILED):
            return compiled(*given, **options)

    return attend


AttentionInterface.register(NAME, _attention)
