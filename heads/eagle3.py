"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

As in EAGLE-1 one decoder layer reads pairs of a hidden state and a token. It mixes the target's
features of three depths, has an output layer of its own, and may put into its hidden state whatever
helps it: it is trained as it drafts, several tokens in a row on hidden states of its own, and no
loss compares these with features.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from .eagle import Eagle, EagleConfig
from .parts.own_layers import unit_scale_init
from .parts.published.eagle import EAGLE3, eagle3
from .trainable import DraftLogits


@strict
class Eagle3Config(EagleConfig):
    """EAGLE-3's shape.

    Attributes:
        feature_layers: whose input it reads; () for the published three, see `mixed_layers`.
        norm_before_residual: whether the layer adds to its normalised input, as heads of
            speculators do, or to the input itself.
    """

    model_type = "headstart_eagle3"
    feature_layers: list[int] | tuple[int, ...] = ()
    depths: int = 7
    output: Literal["own", "trimmed"] = "own"
    norm_before_residual: bool = False

    OPTIONS = ("feature_layers", "depths", "output", "draft_vocab_size", "norm_before_residual")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.feature_layers = config.feature_layers or mixed_layers(target)
        return config


def mixed_layers(target: PreTrainedModel) -> list[int]:
    """The layers whose input EAGLE-3 reads: 2, the middle one, and the third from the end.

    With fewer than 7 layers these are not three, so three are spread over all.
    """
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    return [2, count // 2, count - 3] if count > 6 else [count // 4, count // 2, count - 1]


class _MixedLayer(LlamaDecoderLayer):
    """A decoder layer whose attention reads embeddings beside hidden states: [..., 2 D] -> D."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool):
        super().__init__(config, 0)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, config.attention_bias)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        embedding, hidden = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        mixed = torch.cat([self.input_layernorm(embedding), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(mixed, *args, **options)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(Eagle):
    """EAGLE-3."""

    config_class = Eagle3Config
    from_checkpoint = staticmethod(eagle3)
    exports = EAGLE3

    def _make(self, config: Eagle3Config) -> None:
        size, inner = config.hidden_size, self.model.config
        self.fc = nn.Linear((len(config.feature_layers) or 3) * size, size, bias=False)
        self.model.layers[0] = _MixedLayer(inner, config.norm_before_residual)
        self.norm = LlamaRMSNorm(size, eps=inner.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.output_size, bias=False)

    def bind(self, target: PreTrainedModel) -> Self:
        self.config.feature_layers = self.config.feature_layers or mixed_layers(target)
        return super().bind(target)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as EAGLE-1 does: the last feature plus a little of the token, through copies of the
        target's norm and output layer.

        The token comes through attention. Queries and keys get equal weights for embeddings, so a
        pair attends mostly to itself at first.
        """
        unit_scale_init(self.model)
        layer: Any = self.model.layers[0]
        size, attention = self.config.hidden_size, layer.self_attn
        layer.mlp.down_proj.weight.zero_()
        query, key, value = (
            getattr(attention, f"{name}_proj").weight.unflatten(0, (-1, attention.head_dim))
            for name in "qkv"
        )  # [H, d, 2 D]
        key[..., :size].mul_(2**0.5)  # of size 1 for an embedding alone
        query[..., :size] = key[..., :size].repeat_interleave(len(query) // len(key), 0)
        value[..., :size].mul_(2**0.5)
        value[..., size:] = 0
        for each in (query, key):
            each[..., size:].mul_(0.3)  # too little to change which pair scores highest
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        norm = getattr(self.target.get_decoder(), "norm", None)
        if norm is not None:
            # What it multiplies by, also where it stores that minus 1, centres, or adds a bias.
            signs = torch.ones_like(norm.weight)
            signs[::2] = -1
            self.norm.weight.copy_((norm(signs) - norm(-signs)) * signs / 2)
        self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))

    def _first(self, features: Tensor) -> Tensor:
        return self.fc(super()._first(features)).to(self.dtype)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.embed(tokens), hidden], -1)

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self.lm_head(self.norm(hidden))

    def draft_output(self, depth: int) -> DraftLogits:
        return DraftLogits(self.norm, (self.norm,), self.lm_head.weight)

    def predicted_features(self, states: Tensor) -> Tensor | None:
        return None
