"""The attention of a drafter's own layers, where it differs from that of Qwen3's layers.

A published head may have no norms of queries and keys, or rotary positions that turn only the first
dimensions of each head (`partial_rotary_factor`), as those of GLM, StableLM, Phi and Qwen3.5 do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeRotaryEmbedding,
    rotate_half,
)


class PartlyTurned(Glm4MoeAttention):
    """Attention whose rotary positions turn a share of each head; `use_qk_norm` decides on norms.

    With biases its output has one too, as in Qwen3's layers.
    """

    def __init__(self, config: Any, number: int):
        super().__init__(config, number)
        self.layer_type = config.layer_types[number]
        windowed = self.layer_type == "sliding_attention"
        self.sliding_window = config.sliding_window if windowed else None
        if config.attention_bias:
            self.o_proj = nn.Linear(self.o_proj.in_features, config.hidden_size)


def turns_a_share(config: Any) -> bool:
    """Whether rotary positions turn a share of each head alone."""
    return config.rope_parameters.get("partial_rotary_factor", 1) != 1


def rotary_of(config: Any) -> nn.Module:
    """The rotary embedding of such layers; those of Llama and Qwen3 do not heed the share."""
    return Glm4MoeRotaryEmbedding(config)


def fit_attention(layer: Any, config: Any) -> None:
    """Give a new layer of Llama or Qwen3 the attention that its config asks for."""
    if turns_a_share(config):
        layer.self_attn = PartlyTurned(config, layer.self_attn.layer_idx)
    elif isinstance(config, Qwen3Config) and not config.use_qk_norm:  # type: ignore[attr-defined]
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of queries or keys [..., d], by cosines and sines [..., r] with r ≤ d."""
    size = cos.shape[-1]
    first = states[..., :size]
    first = first * cos + rotate_half(first) * sin
    return first if size == states.shape[-1] else torch.cat([first, states[..., size:]], -1)
