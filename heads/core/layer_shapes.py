"""What each layer of a model caches, found by running one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .errors import UnsupportedTarget
from .offload import device_of

_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Subclasses of these hold states beside keys and values, so the exact type counts."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer caches: its place and the shapes of its keys and values."""

    device: torch.device
    dtype: torch.dtype
    key: tuple[int, int]  # (heads, head dimension)
    value: tuple[int, int]


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Find what each layer of a causal language model caches, by running one token.

    Raises:
        UnsupportedTarget: a layer keeps a state that cannot be rolled back (state-space or linear
            attention), named in the message.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        model(input_ids=token, past_key_values=cache, use_cache=True)
    model.train(was_training)
    shapes = []
    for index, layer in enumerate(cast("list[Any]", cache.layers)):
        if type(layer) not in _PLAIN_LAYERS:
            raise UnsupportedTarget(
                f"{config.model_type} keeps a {type(layer).__name__} at layer {index}, which a "
                "token tree cannot roll back; a target needs keys and values of its own in every "
                "layer: decode it plainly, with model.generate."
            )
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.dim() != 4:
            raise UnsupportedTarget(
                f"{config.model_type} caches no keys and values at layer {index} in the layout of "
                "transformers; a target needs them in every layer: decode it plainly, with "
                "model.generate."
            )
        sizes = [(states.shape[1], states.shape[3]) for states in (keys, values)]
        shapes.append(LayerShape(keys.device, keys.dtype, *sizes))
    if not shapes:
        raise UnsupportedTarget(
            f"{config.model_type} caches no keys and values in the layout of transformers; decode "
            "it plainly, with model.generate."
        )
    return shapes
