"""Decoder layers that read a text by states from elsewhere, and run on a block after it alone.

A token of the text is a key and a value in every layer, made of one state that is the same for all
layers. They are cached at the token's position, as in `cached_layers`; the block's own come after
them, and the next round overwrites these.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ..core import CACHE
from .cached_layers import CachedLayers, DraftCache
from .draft_attention import Mask, attention_for
from .own_attention import turned


def text_keys(model: Any, context: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B, H, T, d] of a text in each layer of a model of Qwen3's layers.

    Args:
        context: [B, T, D], what the projections read.
        positions: [B, T] int64.
    """
    cos, sin = (x.unsqueeze(1) for x in model.rotary_emb(context, positions))  # [B, 1, T, r]
    for layer in model.layers:
        attention = layer.self_attn
        split = (*context.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(split)).transpose(1, 2)
        values = attention.v_proj(context).view(split).transpose(1, 2)
        yield turned(keys, cos, sin), values


def run_blocks(
    model: Any,
    context: Tensor,
    positions: Tensor,
    blocks: Tensor,
    of_blocks: Tensor,
    masks: Mask | dict[str, Mask],
    compute_again: bool,
) -> Tensor:
    """The layers of such a model on blocks [B, A · W, D], all behind one text, in training.

    Args:
        context, positions: of the text, see `text_keys`.
        of_blocks: [B, A · W] int64, the blocks' own positions.
        masks: see `block_mask`; one for each type of layer where some have a window.
        compute_again: whether each layer is computed again by itself in the backward pass.
    """
    angles = model.rotary_emb(blocks, of_blocks)
    types: Any = getattr(model.config, "layer_types", None)

    def run(number: int, mask: Mask, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = DynamicCache()
        cache.update(keys, values, number)
        with attention_for(model, mask):
            return model.layers[number](
                hidden, **{CACHE: cache}, attention_mask=mask,
                position_ids=of_blocks, position_embeddings=angles,
            )  # fmt: skip

    hidden = blocks
    for number, (keys, values) in enumerate(text_keys(model, context, positions)):
        mask = masks[types[number]] if isinstance(masks, dict) else masks
        layer = partial(run, number, mask)
        if compute_again:
            hidden = checkpoint(layer, hidden, keys, values, use_reentrant=False)
        else:
            hidden = layer(hidden, keys, values)
    return hidden


class ContextLayers(CachedLayers):
    """The calls of a drafter with such layers, in place of `begin` and `extend`."""

    def prefill_text(self, state: DraftCache, count: Tensor, context: Tensor) -> None:
        """Cache prompts [B, T, D], padded on the right, of `count` [B] tokens.

        Raises:
            OptionError: see `CachedLayers.prefill`.
        """
        length = context.shape[1]
        self._empty(state, length, count)
        if length:
            positions = torch.arange(length, device=context.device).expand(len(context), -1)
            state.slab.set_slots(range(length), length)
            self._write(state, context, positions)

    def add_text(self, state: DraftCache, count: Tensor, context: Tensor) -> None:
        """Cache what was just committed, [B, A, D], of which `count` [B] are true tokens of a row.

        Padding is cached after the text, where nothing sees it and the next tokens overwrite it.
        """
        steps = torch.arange(context.shape[1], device=count.device)
        positions = state.lengths.unsqueeze(1) + steps  # [B, A]
        state.slab.set_slots(positions, state.slab.capacity)
        self._write(state, context, positions)
        state.lengths = state.lengths + count

    def block(
        self, state: DraftCache, block: Tensor, causal: Callable[[int | None], bool]
    ) -> Tensor:
        """Run a block's embeddings [B, W, D] after the text: [B, W, D].

        Args:
            causal: whether in layers with such a window, or none, a place sees those before it
                alone; if not, all in the window see each other.
        """
        batch, places = block.shape[:2]
        place = torch.arange(places, device=block.device)
        ahead = place - place.unsqueeze(1)  # [W, W], how far after a query a key stands
        seen = {
            window: (ahead < (1 if causal(window) else window or places)).expand(batch, -1, -1)
            for window in self.forward_setup.windows.all
        }
        positions = state.lengths.unsqueeze(1) + place  # [B, W]
        return self._run(state, {"inputs_embeds": block}, positions, seen).last_hidden_state

    def _write(self, state: DraftCache, context: Tensor, positions: Tensor) -> None:
        for number, (keys, values) in enumerate(text_keys(self.model, context, positions)):
            state.slab.update(keys, values, number)
