"""Decoder layers of Gemma 4 with queries alone, which attend to keys and values of another model.

All queries of a row see the same keys. So the heads that share keys and values are further queries
of one head, and nothing is repeated.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, apply_rotary_pos_emb

from ..declared.gemma4_assistant import Gemma4AssistantFields

Keys = tuple[Tensor, Tensor]
"""Keys and values, [B, H, S, d] each."""

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, [B, W, d] or [B, 1, d] each."""


class _Attention(nn.Module):
    def __init__(self, config: Gemma4AssistantFields, size: int):
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(config.width, config.query_heads * size, bias=False)
        self.q_norm = Gemma4RMSNorm(size, config.eps)
        self.o_proj = nn.Linear(config.query_heads * size, config.width, bias=False)

    def forward(self, hidden: Tensor, read: Keys, mask: Tensor, angles: Angles) -> Tensor:
        keys, values = read
        batch, count, heads = *hidden.shape[:2], keys.shape[1]
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.size)))  # [B, W, H, d]
        query = apply_rotary_pos_emb(query, *angles, unsqueeze_dim=2)
        query = query.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, groups, W, d]
        query = query.flatten(2, 3)  # [B, Hkv, groups · W, d]
        mask = mask.expand(-1, -1, query.shape[2], -1)  # [B, 1, groups · W, S]
        found = scaled_dot_product_attention(query, keys, values, mask, scale=1.0)
        found = found.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4)  # [B, W, Hkv, groups, d]
        return self.o_proj(found.reshape(batch, count, -1))


class _Mlp(nn.Module):
    def __init__(self, config: Gemma4AssistantFields):
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.inner_dim, bias=False)
        self.down_proj = nn.Linear(config.inner_dim, config.width, bias=False)
        self.activation: Any = ACT2FN[config.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    layer_scalar: Tensor

    def __init__(self, config: Gemma4AssistantFields, kind: str):
        super().__init__()
        self.self_attn = _Attention(config, config.head_dims[kind])
        self.mlp = _Mlp(config)
        size = config.width, config.eps
        self.input_layernorm = Gemma4RMSNorm(*size)
        self.post_attention_layernorm = Gemma4RMSNorm(*size)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(*size)
        self.post_feedforward_layernorm = Gemma4RMSNorm(*size)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden: Tensor, *attended: Any) -> Tensor:
        read = self.self_attn(self.input_layernorm(hidden), *attended)
        hidden = hidden + self.post_attention_layernorm(read)
        inner = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(inner)) * self.layer_scalar


class QueryLayers(nn.Module):
    """The layers of a config and the norm after them."""

    def __init__(self, config: Gemma4AssistantFields):
        super().__init__()
        self.kinds = list(config.kinds)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in self.kinds)
        self.norm = Gemma4RMSNorm(config.width, config.eps)

    def forward(
        self,
        hidden: Tensor,
        read: dict[str, Keys],
        masks: dict[str, Tensor],
        angles: dict[str, Angles],
    ) -> Tensor:
        """Hidden states [B, W, W'] -> [B, W, W'], normed.

        Args:
            read: the keys and values of each type of attention.
            masks: what is added to the scores of each, [B, 1, 1, S].
            angles: of the positions of the queries, for each.
        """
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            hidden = layer(hidden, read[kind], masks[kind], angles[kind])
        return self.norm(hidden)
