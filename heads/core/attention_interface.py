"""How models of transformers are made to attend by `tree_attention`, for one forward.

Tree attention is registered with transformers' `AttentionInterface`. The packed tree is passed
where a model's 4-D mask is, one for each layer type where windows differ.

A compiled forward gets no cache: its layers hand over the keys and values of the tree, and
attention writes them to the slab itself, in one operator that the compiler does not look into. So
the compiled graph depends on the shape of the tree alone, not on the slab's address and length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .cache import SlabCache
from .errors import UnsupportedTarget
from .tree_attention import tree_attention

NAME, CACHELESS = "headstart_tree", "headstart_tree_cacheless"
"""Under which the attention is registered; the latter where the model is given no cache."""

_UNKNOWN = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What else models hand to their attention, and would be lost here."""


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
    keys, values = _slabs[-1].update(key, value, layer)
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
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise UnsupportedTarget(
                f"{type(module).__name__} attends with {name}, which tree attention does not know; "
                "use attention='masked'."
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not cacheless:
        return tree_attention(query, key, value, attention_mask, scale, softcap), None
    attend: Any = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, attention_mask, module.layer_idx, scale, softcap), None


# Without an entry in AttentionMaskInterface, transformers passes a 4-D mask on and makes none.
AttentionInterface.register(NAME, _attention)
AttentionInterface.register(CACHELESS, partial(_attention, cacheless=True))

_slabs: list[Any] = []
"""Where attention writes in forwards that run without a cache; the last is the innermost's."""


@contextmanager
def tree_attention_on(model: PreTrainedModel, slab: SlabCache | None = None) -> Iterator[None]:
    """For one forward, a model's layers attend by `tree_attention`; their mask is `pack_tree`'s.

    Not for two threads that run one model at once.

    Args:
        slab: where attention writes, when the model is given no cache.
    """
    config: Any = model.get_decoder().config  # the wrapper's may be another copy
    own = config._attn_implementation
    config._attn_implementation = NAME if slab is None else CACHELESS
    _slabs.append(slab)
    try:
        yield
    finally:
        config._attn_implementation = own
        _slabs.pop()
