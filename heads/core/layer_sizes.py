"""The sizes of a language model's layers, from its config."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig


def layer_configs(text: PreTrainedConfig) -> Sequence[Any]:
    """A language model's config, for each of its layers.

    Where layers differ in size, as Gemma 4's do, transformers gives no size of the whole model.
    """
    if getattr(text, "is_heterogeneous", False):
        return text.per_layer_config
    return [text] * text.num_hidden_layers


def inner_size(layer: PreTrainedConfig) -> int:
    """The width of a layer's MLP, from its config; of the first where it lists all (Gemma 3n)."""
    found: Any = getattr(layer, "intermediate_size", None)
    found = found[0] if isinstance(found, list | tuple) else found
    return found or 4 * layer.hidden_size
