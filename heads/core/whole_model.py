"""All layers of a Llama, Mistral or Qwen as one call of a kernel, and little Python around it.

In a forward over a few nodes transformers' own loop prepares what decoding has prepared already: a
mask, a list of layers, records of what they give. For a small model that takes as long as its
layers. Here it is skipped where a trial shows that the result is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from .cache import SlabCache
from .cache_name import CACHE
from .cpu_kernels import MOST_ROWS
from .few_rows import few_rows
from .layer_shape import LayerShape
from .trial import nearly_equal
from .whole_layer import WholeLayer, WholeLayers, run_instead, take_whole_layers

_UNUSED = {"use_cache"}
_OF_THE_LENGTH = ("dynamic", "longrope")  # whose rotary embedding depends on how long a text is


@functools.cache
def _models() -> tuple[type, ...]:
    """Models whose forward is the embedding, all layers in order, those of a type alike, a norm."""
    from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

    return LlamaModel, MistralModel, Qwen2Model, Qwen3Model


class WholeModel:
    """A model without its output layer, all of whose layers and last norm are one call."""

    def __init__(self, model: Any, layers: Sequence[WholeLayer]):
        self.model, self.layers = model, WholeLayers(layers, model)
        attention = layers[0].attention
        self._kind = getattr(attention, "layer_type", None)
        window = getattr(model.config, "sliding_window", None)
        self._windowed = getattr(attention, "sliding_window", window) is not None
        self._known: tuple[Any, ...] = (None,)  # see `_angles`

    def run(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast | None:
        """What the model returns; None where this does not fit."""
        cache = options.pop(CACHE, None)
        if position_ids is None or not isinstance(cache, SlabCache):
            return None
        # Before anything is computed.
        if position_ids.numel() > MOST_ROWS or not (packed := self.layers.packed(cache)):
            return None
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask.get(self._kind)
        if (attention_mask is None and self._windowed) or not _UNUSED.issuperset(options):
            return None
        states = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        found = self.layers.run(
            states,
            attention_mask=attention_mask,
            position_embeddings=self._angles(states, position_ids, cache.capacity),
            packed=packed,
            **{CACHE: cache},
        )
        if found is None:
            return None
        returned: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=found, **returned)

    def _angles(self, states: Tensor, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, D] of positions [B, N], which are below a cache's capacity.

        They are looked up where a position's depend on it alone.
        """
        rotary: Any = self.model.rotary_emb
        heard = rotary._forward_hooks or rotary._forward_pre_hooks
        if heard or rotary.rope_type in _OF_THE_LENGTH:
            return rotary(states, positions)
        kind = rotary.inv_freq._version, rotary.attention_scaling, states.dtype
        known = self._known  # read once: other threads decode too
        if known[0] is not rotary.inv_freq or known[1] != kind or len(known[2]) < capacity:
            places = torch.arange(capacity, device=states.device).unsqueeze(0)
            known = rotary.inv_freq, kind, *(found[0] for found in rotary(states, places))
            self._known = known
        _, _, cosines, sines = known
        rows = positions.flatten()
        shape = *positions.shape, cosines.shape[-1]
        return cosines.index_select(0, rows).view(shape), sines.index_select(0, rows).view(shape)


def take_whole_models(model: nn.Module) -> int:
    """`take_whole_layers`, and models of nothing but such layers as one call too."""
    count = take_whole_layers(model)
    parts: list[Any] = list(model.modules())
    for part in parts if count else ():
        if type(part) not in _models() or "forward" in vars(part):
            continue
        layers = [WholeLayer.of(layer) for layer in part.layers]
        known = [each for each in layers if each is not None]
        same = len(known) == len(layers) == part.config.num_hidden_layers
        if same and len({each.kind for each in known}) == 1:
            whole = WholeModel(part, known)
            if _is_the_same(part, whole):
                run_instead(part, whole.run)
    return count


@torch.no_grad()
def _is_the_same(model: Any, whole: WholeModel) -> bool:
    """Whether two made-up tokens come out as of the model's own loop over the same layers."""
    first = whole.layers.layers[0]
    weight, size = first.products[0].weight, first.sizes[0]
    entry = first.products[1].out_features // size, size
    shape = LayerShape(weight.device, weight.dtype, entry, entry)
    cache = SlabCache([shape] * len(model.layers), 1, 64)
    draws = torch.Generator().manual_seed(0)
    given = {
        "inputs_embeds": torch.randn(1, 2, weight.shape[1], generator=draws).to(weight.dtype),
        "attention_mask": torch.ones(2, 64).triu(1).mul(-1e9).to(weight.dtype)[None, None],
        "position_ids": torch.arange(2).unsqueeze(0),
        CACHE: cache,
        "use_cache": True,
    }
    cache.set_slots(range(2), 64)
    with few_rows():
        found, own = whole.run(**given), model(**given)
    return found is not None and nearly_equal(found[0], own[0])
