"""Bytes of what a run holds, on a device and on disk; by arithmetic, from shapes alone.

`headstart check` and the checks before the first stage ask for what is needed at least, the
estimates of recipes for what is expected: both count by these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headstart.heads import FINAL, Drafter
from headstart.heads.core import LayerShape, decoder_of, probe_layers
from headstart.heads.core.layer_sizes import layer_configs
from headstart.heads.parts.adapted_layers import is_adapted
from headstart.heads.parts.own_layers import recurrent_layers

from .losses import loss_of
from .recipe import Recipe, Train

ROW_TOKEN = 5
"""Of a token of a training row on disk: an id, and whether it is supervised."""

STORED = 3 * 12
"""Of a parameter that learns, on disk at most: weight and Adam's two moments of three checkpoints,
the best, the last, and one that is being written."""

ARTIFACT = 4
"""Of a parameter of the drafter in its artifact."""

_NF4 = 4.127 / 8
"""Of a weight in NF4, with its scales, which are quantized themselves (QLoRA, arXiv 2305.14314)."""


def matrix_shape(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None for any other."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else None


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def adapter_parameters(target: PreTrainedModel, drafter: Drafter) -> int:
    """Of a drafter's adapter in this target: rank × (inputs + outputs) of each adapted layer."""
    if drafter.adapter is None:
        return 0
    config: Any = drafter.config
    kind, sizes = target.config.model_type, 0
    for name, module in decoder_of(target).named_modules():
        if (shape := matrix_shape(module)) and is_adapted(name, config.modules, kind):
            sizes += sum(shape)
    if "lm_head" in config.modules:
        text: Any = target.config.get_text_config(decoder=True)
        sizes += text.hidden_size + text.vocab_size
    return config.rank * sizes


def weight_bytes(target: PreTrainedModel, dtype: str) -> float:
    """A target's weights as they are loaded; NF4 quantizes the layers' matrices alone.

    Args:
        dtype: `target.dtype` of a recipe; `auto` is that of the target's config.
    """
    weights = parameters_of(target)
    if dtype == "4bit":
        # By their sizes, since quantized weights are packed and sharded ones empty.
        shapes = filter(None, map(matrix_shape, decoder_of(target).modules()))
        layers = sum(inputs * outputs for inputs, outputs in shapes)
        return layers * _NF4 + (weights - layers) * 2
    return float(weights * _itemsize(target, dtype))


def recurrent_shapes(target: PreTrainedModel) -> list[LayerShape]:
    """What the layers of a target on `meta` cache, where some are recurrent; empty where none is.

    Raises:
        UnsupportedTarget: one keeps a state that cannot be rolled back.
    """
    if not recurrent_layers(target.config):
        return []
    text, name = target.config.get_text_config(decoder=True), "_experts_implementation"
    before = getattr(text, name, None)
    setattr(text, name, "batched_mm")  # other ways ask for data
    try:
        return probe_layers(target)
    finally:
        setattr(text, name, before)


def cache_bytes(shapes: list[LayerShape], text: Any, rows: int, tokens: float) -> float:
    """What a target caches of `rows` texts of so many tokens; keys and values in 16 bits.

    Args:
        shapes: of `recurrent_shapes`: a recurrent layer's state is as large for a text of any
            length.
        text: the config of its language model.
    """
    if shapes:
        each = sum(math.prod(size) for shape in shapes for size in (shape.key, shape.value))
        state = sum(shape.recurrent.bytes_of_row for shape in shapes if shape.recurrent)
        return rows * (tokens * each * 2 + state)
    each = 0
    for layer in layer_configs(text):
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        head = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        each += 2 * heads * head
    return float(rows * tokens * each * 2)


def feature_bytes(
    recipe: Recipe, target: PreTrainedModel, drafter: Drafter, tokens: float
) -> float:
    """The target's features of rows of `tokens` in all, as far as the recipe keeps them on disk."""
    train, layers = recipe.train, set(drafter.config.feature_layers)
    if loss_of(train.loss).divergence is not None or train.feature_weight > 0:
        layers.add(FINAL)
    dtype = "float32" if recipe.target.scratch is not None else recipe.target.dtype
    every = tokens * len(layers) * drafter.config.hidden_size * _itemsize(target, dtype)
    if not drafter.trainable or every <= 1e6 * train.feature_cache_mb:  # in memory, without files
        return 0.0
    return min(1e9 * train.feature_disk_gb, every)


def _itemsize(target: PreTrainedModel, dtype: str) -> int:
    """Bytes of a number of a target that is loaded as `target.dtype` of a recipe says."""
    if dtype == "4bit":
        return 2
    kind = getattr(target.config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    return (kind or torch.float32).itemsize


def collected_bytes(drafter: Drafter, tokens: float) -> float:
    """At most what a drafter keeps of texts of so many tokens, if it is made of them."""
    if not drafter.collects:
        return 0.0
    return 8.0 * min(tokens, drafter.config.max_tokens)  # each token, and its place in the order


def packed_tokens(train: Train, row: int) -> int:
    """Of what stands in one row of a batch, at most, where rows of so many tokens are packed."""
    return max(train.packed_length or row, row)


def state_bytes(train: Train) -> int:
    """Of a parameter that learns: its float32 weight and gradient, and the optimizer's moments."""
    return 10 if train.optimizer == "adamw_8bit" else 16
