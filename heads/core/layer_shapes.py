"""What each layer of a model caches, found by running one token."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .errors import undrivable
from .eval_mode import eval_mode
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
        UnsupportedTarget: a layer keeps a state that cannot be rolled back, such as a state-space
            layer's.
    """
    config = model.config.get_text_config(decoder=True)
    name, layout = config.model_type, "in the layout of transformers"
    cache = DynamicCache(config=config)
    with eval_mode(model):
        token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        model(input_ids=token, past_key_values=cache, use_cache=True)
    shapes = []
    for index, layer in enumerate(cast("list[Any]", cache.layers)):
        if type(layer) not in _PLAIN_LAYERS:
            kept = f"keeps a {type(layer).__name__} at layer {index}, which cannot be rolled back"
            raise undrivable(name, f"{kept}; expected keys and values in every layer")
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.dim() != 4:
            raise undrivable(name, f"caches no keys and values at layer {index} {layout}")
        sizes = [(states.shape[1], states.shape[3]) for states in (keys, values)]
        shapes.append(LayerShape(keys.device, keys.dtype, *sizes))
    if not shapes:
        raise undrivable(name, f"caches no keys and values {layout}")
    return shapes
