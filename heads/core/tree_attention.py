"""Tree attention: the prefix without a mask, the tree with its ancestors, merged by log-sum-exp.

All nodes of a tree see the prefix, up to a length that device memory holds; only among themselves
do they need a mask. So in place of an additive mask over all slots, [B, 1, N, S], each node has its
line, see `tree_lines`. Softmax over both parts is the softmax of each, weighted by its share of
exp(log-sum-exp) (Milakov and Gimelshein 2018, arXiv 1805.02867), so the parts can be computed
apart, and the prefix can be split further.

Models of transformers attend so for one forward, of one thread, by its `AttentionInterface`. The
packed tree is passed where their 4-D mask is, one for each layer type where windows differ.

A compiled forward gets no cache: its layers hand over the keys and values of the tree, and
attention writes them to the slab itself, in one operator that the compiler does not look into. So
the compiled graph depends on the shape of the tree alone, not on the slab's address and length.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .cache import SlabCache
from .errors import UnsupportedTarget
from .few_rows import attends_in_few_rows, attention
from .triton_here import no_kernel

_UNKNOWN = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What else models hand to their attention, and would be lost here."""


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of tree nodes to the cached prefix and to their ancestors.

    The kernel where there is one, `plain_attention` elsewhere. Grouped queries share their keys and
    values, which are never repeated.

    Args:
        query: [B, Hq, N, D], the last N of G nodes.
        key: [B, Hkv, S, D], slots of the cache, of which the tree takes G after the prefix; value:
            [B, Hkv, S, Dv]. Hkv divides Hq.
        packed: [B, 1, N, 2 + G] int32, see `pack_tree`.
        scaling: what the scores are multiplied by.
        softcap: c of c · tanh(score / c), which softmax then takes; None for the score itself.

    Returns:
        [B, N, Hq, Dv] in the query's dtype.
    """
    attend = plain_attention
    if no_kernel(query.device, query.dtype, max(query.shape[-1], value.shape[-1])) is None:
        from .kernels import split_attention as attend
    return attend(query, key, value, packed, scaling, softcap)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    scaling: float,
    softcap: float | None = None,
    block: int = 1024,
) -> Tensor:
    """`tree_attention` in torch's own operators, by blocks of slots, at least in float32."""
    batch, query_heads, nodes, size = query.shape
    heads, tree = key.shape[1], packed.shape[-1] - 2
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * scaling).reshape(batch, heads, -1, size)  # [B, Hkv, groups·N, D]

    def part(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over some slots; seen is [B, 1, N, slots]."""
        scores = rows @ keys.to(wide).transpose(2, 3)  # [B, Hkv, groups·N, slots]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~seen.repeat(1, 1, query_heads // heads, 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        # Finite where nothing is seen, so that the weights are 0 there, not NaN.
        total = scores.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        return (scores - total).exp() @ values.to(wide), total

    first, end = packed[..., :1], packed[..., 1:2]  # [B, 1, N, 1]
    slots = torch.arange(key.shape[2], device=query.device)
    own = (end[:, :, :1] + slots[:tree, None]).long()  # [B, 1, G, 1]
    output, total = part(
        key.gather(2, own.expand(-1, heads, -1, size)),
        value.gather(2, own.expand(-1, heads, -1, value.shape[-1])),
        packed[..., 2:] != 0,
    )
    for start in range(0, key.shape[2] - tree, block):
        now = slice(start, min(start + block, key.shape[2] - tree))
        seen = (slots[now] >= first) & (slots[now] < end)
        other, share = part(key[:, :, now], value[:, :, now], seen)
        both = torch.logaddexp(total, share)
        output = output * (total - both).exp() + other * (share - both).exp()
        total = both
    output = output.view(batch, query_heads, nodes, -1)
    return output.transpose(1, 2).contiguous().to(query.dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Write a layer's new keys and values [B, Hkv, N, D] to the slab; attend to what it holds."""
    keys, values = _now.slab.update(key, value, layer)
    return tree_attention(query, keys, values, packed, scaling, softcap)


# The slab is no argument, so compilers do not see that it is written. Calls are not merged or
# reordered all the same, since each has another layer number and feeds the next one.
_opaque = torch.library.custom_op(
    "headstart::attend",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor packed, int layer, float scaling, "
    "float? softcap) -> Tensor",
)


@_opaque.register_fake
def _shape_of(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[-1])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    cacheless: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """What models call; keys and values are all that is cached, or `cacheless` the tree's own."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        found = "no mask" if attention_mask is None else f"a mask of {attention_mask.dtype}"
        raise UnsupportedTarget(
            f"{type(module).__name__} hands {found} to tree attention, which needs the packed tree "
            "as it is; use attention='masked'."
        )
    if unknown := next((name for name in _UNKNOWN if options.get(name) is not None), None):
        raise UnsupportedTarget(
            f"{type(module).__name__} attends with {unknown}, which tree attention does not know; "
            "use attention='masked'."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not cacheless:
        return tree_attention(query, key, value, attention_mask, scale, softcap), None
    attend: Any = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, attention_mask, module.layer_idx, scale, softcap), None


class _Forward(threading.local):
    """What the forward that a thread runs now attends by; its model's own attention when None."""

    def __init__(self) -> None:  # in each thread; compilers overlook what hides a class's own
        self.attend: Callable[..., Any] | None = None
        self.slab: Any = None  # where attention writes, in a forward without a cache


_now, _own_interface = _Forward(), AttentionInterface.get_interface


def _interface(
    self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
) -> Any:
    if _now.attend is not None:
        return _now.attend
    own = _own_interface(self, attn_implementation, default)
    if attn_implementation == "sdpa" and attends_in_few_rows():
        return partial(attention, own)
    return own


# Layers ask this in each forward. A name in the model's config instead would be read by every
# thread that runs the model.
AttentionInterface.get_interface = _interface

_cacheless = partial(_attention, cacheless=True)


class _Asked(Exception):
    """A layer has asked for its attention."""


def asks_for_attention(model: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether a model's layers take their attention from transformers, on tokens [B, T].

    One that has attention of its own gets the packed tree as if it were a mask.
    """

    def attend(*args: Any, **options: Any) -> Any:
        raise _Asked

    before, _now.attend = _now.attend, attend
    try:
        model(input_ids=tokens, use_cache=False)
    except _Asked:
        return True
    finally:
        _now.attend = before
    return False


@contextmanager
def tree_attention_on(slab: SlabCache | None = None) -> Iterator[None]:
    """In this thread, for one forward, layers attend by `tree_attention`; masks are `pack_tree`'s.

    Args:
        slab: where attention writes, when the model is given no cache.
    """
    before = _now.attend, _now.slab
    _now.attend, _now.slab = (_attention if slab is None else _cacheless), slab
    try:
        yield
    finally:
        _now.attend, _now.slab = before
