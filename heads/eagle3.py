"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

As in EAGLE-1 one decoder layer reads pairs of a hidden state and a token. It mixes the target's
features of three depths, has an output layer of its own, and may put into its hidden state whatever
helps it: it is trained as it drafts, several tokens in a row on hidden states of its own, and no
loss compares these with features.

What published heads have besides, each by a field of the config: a size and embeddings of their
own, several layers, norms of the features before they are mixed (EAGLE-3.1), a normed state that
feeds the next step, and drafts that are made all at once (P-EAGLE, arXiv 2602.01469): there every
pair after the first holds a learned state and a mask token in the place of what is not known yet.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .checkpoint import Found
from .core import output_rows
from .declared.eagle import Eagle3Fields
from .drafter import Step, from_last_true
from .eagle import Eagle, EagleConfig, Past
from .parts.cached_layers import DraftCache
from .parts.mask_blocks import MaskBlocks, depth_shares
from .parts.own_attention import fit_attention
from .parts.own_layers import llama_like, norm_scale, silence, unit_scale_init
from .parts.published.eagle import eagle3
from .parts.published.eagle_files import EAGLE3
from .parts.published.layer_ids import published_layers
from .trainable import DraftLogits


@strict
class Eagle3Config(Eagle3Fields, EagleConfig):
    """See `Eagle3Fields`."""

    model_type = "headstart_eagle3"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.layer = config.own_layer(llama_like(target), num_hidden_layers=config.layers)
        config.feature_layers = config.feature_layers or mixed_layers(target)
        return config


def mixed_layers(target: PreTrainedModel) -> list[int]:
    """The layers whose input EAGLE-3 reads: 2, the middle one, and the third from the end.

    With fewer than 7 layers these are not three, so three are spread over all.
    """
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    return [2, count // 2, count - 3] if count > 6 else [count // 4, count // 2, count - 1]


class _Mixed:
    """A decoder layer whose attention reads embeddings beside hidden states: [..., 2 D] -> D."""

    self_attn: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, config: Any, norm_before_residual: bool):
        super().__init__(config, 0)  # type: ignore[call-arg]
        fit_attention(self, config)
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


class _MixedLlama(_Mixed, LlamaDecoderLayer):  # type: ignore[misc]
    pass


class _MixedQwen3(_Mixed, Qwen3DecoderLayer):  # type: ignore[misc]
    pass


class Eagle3(Eagle):
    """EAGLE-3."""

    config_class = Eagle3Config
    from_checkpoint = staticmethod(eagle3)
    exports = EAGLE3

    def _make(self, config: Eagle3Config) -> None:
        inner: Any = self.model.config
        size, wide, count = inner.hidden_size, config.hidden_size, len(config.feature_layers) or 3
        self.fc = nn.Linear(count * wide, size, bias=False)
        mixed = _MixedLlama if type(self.model) is LlamaModel else _MixedQwen3
        self.model.layers[0] = mixed(inner, config.norm_before_residual)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(count * wide, eps=inner.rms_norm_eps)
        if config.fc_norm:
            norms = (LlamaRMSNorm(wide, eps=inner.rms_norm_eps) for _ in range(count))
            self.fc_norm = nn.ModuleList(norms)
        self.norm = LlamaRMSNorm(size, eps=inner.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.output_size, bias=False)
        self.independent = config.mask_token_id is not None
        if self.independent:
            self.mask_hidden = nn.Parameter(torch.zeros(count * wide))

    @classmethod
    def completed(cls, found: Found, target: PreTrainedModel) -> Found:
        """Name the layers that a checkpoint leaves to the published rule, and fill in the target's
        output layer where it has none."""
        known, tensors = super().completed(found, target)
        if "feature_layers" not in known:
            count = target.config.get_text_config(decoder=True).num_hidden_layers
            known = known | {"feature_layers": published_layers(count)}
        if "lm_head.weight" not in tensors:
            rows = output_rows(target).to("cpu", tensors["norm.weight"].dtype)
            tensors = tensors | {"lm_head.weight": rows.clone()}
        return known, tensors

    def bind(self, target: PreTrainedModel) -> Self:
        self.config.feature_layers = self.config.feature_layers or mixed_layers(target)
        return super().bind(target)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as EAGLE-1 does: the last feature plus a little of the token, through copies of the
        target's norm and output layer.

        The token comes through attention. Queries and keys get equal weights for embeddings, so a
        pair attends mostly to itself at first. Layers after the first one add nothing yet.
        """
        unit_scale_init(self.model)
        layer: Any = self.model.layers[0]
        size, attention = self.config.hidden_size, layer.self_attn
        layer.mlp.down_proj.weight.zero_()
        for deeper in self.model.layers[1:]:
            silence(deeper)
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
        if (scale := norm_scale(self.target)) is not None:
            self.norm.weight.copy_(scale)
        self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))
        if self.independent:
            self.mask_hidden.normal_()  # a norm's slope at zeros would be steep

    def _first(self, features: Tensor) -> Tensor:
        features = super()._first(features)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            each = features.chunk(len(self.fc_norm), -1)
            normed = [norm(one) for norm, one in zip(self.fc_norm, each, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features).to(self.dtype)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.embed(tokens), hidden], -1)

    def _left(self, found: Any) -> Tensor:
        left = super()._left(found)
        return self.norm(left) if self.config.norm_output else left

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        ahead = self.config.depths - 1 if self.independent else 0
        super().reserve(state, longest, room + ahead)

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        if not self.independent:
            return super().begin(state, features, tokens, count)
        ahead, known = self.config.depths - 1, tokens.shape[1]
        masks = tokens.new_empty(len(tokens), ahead)
        pairs = self._pairs(*self._with_masks(tokens, self._first(features), masks))
        left = self._left(self._layers.begin(state, count, ahead, inputs_embeds=pairs))
        return self.propose(from_last_true(left, count, known))  # [B, K, D]

    def _with_masks(self, tokens: Tensor, hidden: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and hidden states [B, T, D], and after them what stands for those that are
        not known yet, for each of `masks` [B, Q]."""
        token = torch.full_like(masks, self.config.mask_token_id)
        state = self._first(self.mask_hidden).expand(*masks.shape, -1)
        return torch.cat([tokens, token], 1), torch.cat([hidden, state], 1)

    @property
    def depth_shares(self) -> list[float] | None:
        own = self.config
        return depth_shares(own.depths, own.kept, own.least_kept) if self.independent else None

    def passes(self, row: float) -> float:
        return super().passes(row) if self.depth_shares is None else sum(self.depth_shares)

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As EAGLE-1 does or, where all drafts are made at once, in one pass, see `MaskBlocks`."""
        if not self.independent:
            return super().draft_hidden_states(features, tokens, where, depths, positions)
        blocks = MaskBlocks.of(where, depths, positions, wanted, newest=0)
        # The last pair lacks its token: any will do, since no chosen state depends on it.
        text = tokens.roll(-1, 1), self._first(features)
        mask = blocks.attention(self._windows, **self._mask_options)
        pairs = self._with_masks(*text, blocks.start)
        return blocks.states(self._run(Past(), *pairs, blocks.positions, mask))

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        if self.config.norm_output:
            return self.lm_head
        return lambda hidden: self.lm_head(self.norm(hidden))

    def draft_output(self, depth: int) -> DraftLogits:
        if self.config.norm_output:
            return DraftLogits(weight=self.lm_head.weight)
        return DraftLogits(self.norm, (self.norm,), self.lm_head.weight)

    def predicted_features(self, states: Tensor) -> Tensor | None:
        return None
