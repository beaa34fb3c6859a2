"""Which masks a model wants, and the additive ones with which its own attention runs a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import SlabCache
from .errors import UnsupportedTarget, undrivable
from .layer_sizes import layer_configs
from .tree import Topology

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""The last sees its chunk alone; texts end with the first one, see `PositionLimit`."""
_WITHOUT_MASKS = ("linear_attention", "conv")
"""What models call the masks of recurrent layers, which are given none."""
_RECURRENT = {*_WITHOUT_MASKS, "hybrid", "hybrid_sliding"}  # the latter attend, too
KEEPS_NOTHING = {"mlp", "moe"}
"""Types of layers that are an MLP or experts alone, as in Nemotron-H, and cache nothing."""
_Mask = TypeVar("_Mask")

_OWN_WINDOWS = {
    "moshi": "its masks leave out the window that its config declares",
    "gpt_neo": "it cuts its local attention by the length of the cache",
}
"""Models whose windows no explicit mask decides; a trial with a short text does not show it."""


@dataclass(frozen=True)
class AttentionWindows:
    """Which masks a model wants: one window for all layers, or one for each layer type.

    A window of w lets a query at position p see positions p - w + 1 … p; None sees everything.
    Layers of the types `without_masks` are given none. With `tree` its masks are packed trees, for
    tree attention; with `cacheless` it is also given no cache, which attention writes itself.
    """

    single: int | None
    by_type: dict[str, int | None] | None
    tree: bool = False
    cacheless: bool = False
    without_masks: tuple[str, ...] = ()

    def masks(self, make: Callable[[int | None], _Mask]) -> _Mask | dict[str, _Mask]:
        """What `make` makes of a window: one for all layers, or one for each layer type."""
        if self.by_type is None:
            return make(self.single)
        return {kind: make(window) for kind, window in self.by_type.items()}

    @property
    def all(self) -> set[int | None]:
        """Every window that there is."""
        return {self.single} if self.by_type is None else set(self.by_type.values())

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionWindows:
        """Read the windows from a model's config; `UnsupportedTarget` if no tree can drive it."""
        config = model.config.get_text_config(decoder=True)
        name = config.model_type
        if model.config.is_encoder_decoder:
            raise undrivable(model.config.model_type, "is an encoder-decoder, not a decoder alone")
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise UnsupportedTarget(
                f"{name} runs attention as {implementation!r}; a token tree needs an explicit "
                "mask: call model.set_attn_implementation('sdpa')."
            )
        if reason := _OWN_WINDOWS.get(name):
            raise undrivable(name, f"does not heed an explicit attention mask: {reason}")
        windows = {getattr(layer, "sliding_window", None) for layer in layer_configs(config)}
        if len(windows) > 1:
            raise undrivable(name, "has sliding windows of several widths; expected one")
        window, types = windows.pop(), getattr(config, "layer_types", None)
        if not types:
            return cls(window, None)
        if unknown := sorted(set(types) - _ATTENTION - _RECURRENT - KEEPS_NOTHING):
            known = ", ".join(sorted(_ATTENTION | _RECURRENT | KEEPS_NOTHING))
            raise undrivable(name, f"has layers of type {unknown[0]!r}; expected any of {known}")
        if _RECURRENT & set(types):
            full: dict[str, int | None] = {"full_attention": None}
            sliding = {"sliding_attention": window} if window is not None else {}
            return cls(None, full | sliding, without_masks=_WITHOUT_MASKS)
        by_type = {kind: window if kind == "sliding_attention" else None for kind in types}
        return cls(None, by_type) if len(by_type) > 1 else cls(by_type.popitem()[1], None)


def tree_mask(
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    live: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """The additive attention mask of a tree, whose nodes are written after the cached prefix.

    Args:
        lengths: [B] int64, cached tokens of each row; slot s of the prefix holds position s, and
            node n is written at slot length + n.
        positions: [B, N] int64, the position of each node.
        ancestors: [B, N, N] bool, see `ancestor_mask`.
        live: S, slots that the model attends to.
        window: width of a sliding window, or None.

    Returns:
        [B, 1, N, S]: 0 where attention is allowed, the dtype's lowest value elsewhere.
    """
    batch, nodes, _ = ancestors.shape
    start = lengths.unsqueeze(1)  # [B, 1]
    slots = torch.arange(live, device=lengths.device)
    allowed = (slots < start).unsqueeze(1)  # [B, 1, S]
    if window is not None:
        oldest = positions.unsqueeze(-1) - window  # [B, N, 1]
        allowed = allowed & (slots > oldest)  # [B, N, S]
        ancestors = ancestors & (positions.unsqueeze(1) > oldest)
    own = (start + slots[:nodes]).unsqueeze(1).expand(-1, nodes, -1)  # [B, N, N]
    seen = allowed.expand(batch, nodes, live).scatter(2, own, ancestors)  # [B, N, S]
    return torch.where(seen.unsqueeze(1), *_bounds(dtype, lengths.device))


@cache
def _bounds(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    bounds = (0.0, torch.finfo(dtype).min)
    return tuple(torch.tensor(bound, dtype=dtype, device=device) for bound in bounds)


def shifted_mask(
    shape: Topology, slab: SlabCache, seen: int, live: int, window: int | None
) -> Tensor:
    """`tree_mask` of rows that all have length `seen`, [B, 1, N, S]: a view of a longer row's mask.

    Relative to its row's length a tree's mask is the same at every length, so one for C cached
    tokens, over twice as many slots, holds that of every shorter row, further to the right.
    """
    mask = shape.masks.get((window, slab.dtype))
    if mask is None or mask.shape[-1] < 2 * slab.capacity:
        lengths = torch.full_like(shape.depth[:1, 0], slab.capacity)  # [1]
        ends = slab.capacity + shape.depth[:1]  # [1, N]
        mask = tree_mask(lengths, ends, shape.ancestors[:1], 2 * slab.capacity, slab.dtype, window)
        shape.masks[window, slab.dtype] = mask
    mask = mask.narrow(-1, mask.shape[-1] // 2 - seen, live)
    if mask.device.type != "cpu":
        mask = mask.contiguous()  # kernels there want rows that begin at even addresses
    return mask if slab.batch == 1 else mask.expand(slab.batch, -1, -1, -1)
