"""EAGLE: one decoder layer that goes on from the target's features, one drafted token at a time.

At position t it reads the pair of the target's feature f_t and the token x_t+1 that followed, over
the pairs before it in a cache of its own, and its hidden state says x_t+2. From there on it feeds
on itself: a drafted token is paired with the hidden state of its parent.

    pair 0        pair 1        pair 2        drafted     drafted
    f_0 x_1       f_1 x_2       f_2 x_3       h_3 x_4     h_4 x_5
                                -> h_3: x_4   -> h_4: x_5 -> h_5: x_6

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) reads the final features, and its hidden state is the
next one, as good as it can tell: the target's own output layer reads it. EAGLE-2 (arXiv
2406.16858) is the same drafter under best-first trees, `best-first:61,10,7` as published.
EAGLE-3 (arXiv 2503.01840) mixes features of three depths, has an output layer of its own, and is
free to put into its hidden state what helps it: it is taught as it drafts, several tokens in a row
on hidden states of its own, and no feature is asked for.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from .core import OptionError, output_layer
from .drafter import DrafterConfig, Step, last_true
from .parts.cached_layers import CachedLayers, DraftCache, layer_like, own_layers
from .parts.eagle_checkpoints import eagle1, eagle3
from .parts.vocabulary import TokenConditioned, check_draft_vocabulary


@strict
class EagleConfig(DrafterConfig):
    """EAGLE-1's shape.

    Attributes:
        layer: the decoder layer's sizes, see `layer_like`; by default the target's own.
        depths: K, how many tokens in a row a training loss covers: 1 as published. With more it is
            taught on its own hidden states, as it drafts (HASS, arXiv 2408.15766).
        draft_vocab_size: 0, the target's output layer knows every token.
    """

    model_type = "headstart_eagle"
    layer: dict[str, Any] | None = None
    depths: int = 4
    draft_vocab_size: int = 0

    OPTIONS: ClassVar[tuple[str, ...]] = ("depths",)

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.layer = layer_like(target)
        return config

    def validate_eagle(self) -> None:
        """Part of the config's own validation: what single fields cannot say."""
        if self.depths < 1:
            raise OptionError(f"drafter.depths is {self.depths}; expected at least 1.")


@strict
class Eagle3Config(EagleConfig):
    """EAGLE-3's shape.

    Attributes:
        feature_layers: whose input it reads; () for the published three, see `mixed_layers`.
        output: `own` knows every token, `trimmed` the `draft_vocab_size` most frequent ones of the
            corpus.
        draft_vocab_size: size of the trimmed vocabulary; 0 unless `output` is `trimmed`.
        norm_before_residual: whether the layer adds to its normalised input, as heads of
            speculators do, or to the input itself.
    """

    model_type = "headstart_eagle3"
    feature_layers: list[int] | tuple[int, ...] = ()
    depths: int = 7
    output: Literal["own", "trimmed"] = "own"
    norm_before_residual: bool = False

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("feature_layers", "depths", "output", "draft_vocab_size", "norm_before_residual"),
    )

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.feature_layers = config.feature_layers or mixed_layers(target)
        return config

    def validate_eagle3(self) -> None:
        """Part of the config's own validation: what single fields cannot say."""
        check_draft_vocabulary(self, self.output, self.draft_vocab_size)


def mixed_layers(target: PreTrainedModel) -> list[int]:
    """The layers whose input EAGLE-3 reads: 2, the middle one, and the third from the end.

    Of fewer than 7 these are not three, so they are spread over all that there are.
    """
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    return [2, count // 2, count - 3] if count > 6 else [count // 4, count // 2, count - 1]


class _State:
    """A request: the cache, and what the round has drafted.

    Attributes:
        cache: the pairs of the text, and those of the nodes that this round has grown.
        hidden: [B, 1 + nodes, D] the hidden state at each node so far, the root's first.
    """

    hidden: Tensor

    def __init__(self, cache: DraftCache):
        self.cache = cache


class Eagle(TokenConditioned):
    """EAGLE-1, and what EAGLE-3 has in common with it."""

    config_class = EagleConfig
    config: Any
    needs_length_bound = True

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.model, shapes = own_layers(config.layer or {})
        self._make(config)
        self._layers = CachedLayers(self.model, shapes)
        self.post_init()

    def _make(self, config: Any) -> None:
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.model.layers[0].input_layernorm = nn.Identity()

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        return eagle1(config, tensors)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return [*super().shared_modules(target), output_layer(target)]

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as the target's own output layer: the feature, with the token beside it, passes a
        layer that adds nothing yet."""
        _spread(self.model)
        layer: Any = self.model.layers[0]
        size = self.config.hidden_size
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        token, feature = self.fc.weight.chunk(2, 1)
        token.normal_().div_(self.size_of_embeddings() * size**0.5)  # what is added is of size 1
        feature.copy_(torch.eye(size))
        self.fc.bias.zero_()

    def _first(self, features: Tensor) -> Tensor:
        """The target's features [..., F] in the place of a hidden state: [..., D]."""
        return features.to(self.dtype)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Tokens [...] and the hidden states before them [..., D]: what the layer reads."""
        pairs = torch.cat([self.embed(tokens), hidden], -1)
        return self.fc(pairs).to(self.dtype)  # under autocast too: what is added to stays precise

    def _logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., Vd]."""
        return self.target_logits(hidden)

    def start(self, batch: int, capacity: int) -> _State:
        return _State(self._layers.start(batch))

    def reserve(self, state: _State, longest: int, room: int) -> None:
        # The root's pair stands one before the root itself.
        self._layers.reserve(state.cache, longest - 1, room)

    def prefill(self, state: _State, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        pairs = self._pairs(tokens[:, 1:], self._first(features[:, :-1]))
        self._layers.prefill(state.cache, pairs.shape[1], count - 1, inputs_embeds=pairs)

    def begin(self, state: _State, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        pairs = self._pairs(tokens, self._first(features))
        found = self._layers.begin(state.cache, tokens.shape[1], count, inputs_embeds=pairs)
        state.hidden = last_true(found.last_hidden_state, count).unsqueeze(1)  # [B, 1, D]
        return Step(self._logits(state.hidden), self.draft_vocabulary)

    def extend(self, state: _State, tokens: Tensor, parent: Tensor) -> Step:
        above = (parent + 1).unsqueeze(-1).expand(-1, -1, state.hidden.shape[-1])
        pairs = self._pairs(tokens, state.hidden.gather(1, above))
        hidden = self._layers.extend(state.cache, parent, inputs_embeds=pairs).last_hidden_state
        state.hidden = torch.cat([state.hidden, hidden], 1)
        return Step(self._logits(hidden), self.draft_vocabulary)

    @property
    def train_depths(self) -> int:
        return self.config.depths

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        """Depth 1 runs on all pairs of the text; each deeper one goes on from every position.

        At depth k the pair of position t is its hidden state of depth k - 1 and token x_t+k, in
        place t + k - 1. It sees the text's pairs up to t and its own of depths 2 … k: of the keys
        that a depth adds, a query sees the one of its own position. That mask serves all heads;
        scores written out take as long, and from 16 heads on twice the memory.
        """
        batch, length = tokens.shape
        most = max(int(where.sum(1).max()), 1)
        at = where.byte().argsort(dim=1, descending=True, stable=True)[:, :most]  # [B, W]
        chosen = where.gather(1, at)
        cache = DynamicCache()
        first = self._first(features)  # [B, T, D]
        # The last pair lacks its token: any will do, and nothing that is asked for sees it.
        hidden = self._run(cache, tokens.roll(-1, 1), first)
        found = [hidden[where]]
        hidden = hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # [B, W, D]
        seen = torch.arange(length, device=at.device) <= at.unsqueeze(-1)  # [B, W, T]
        own = torch.eye(most, dtype=torch.bool, device=at.device).expand(batch, -1, -1)
        for depth in range(2, depths + 1):
            seen = torch.cat([seen, own], -1)  # [B, W, T + (k - 1) W]
            token = tokens.gather(1, (at + depth).clamp(max=length - 1))
            hidden = self._run(
                cache, token, hidden, position_ids=at + depth - 1, attention_mask=seen.unsqueeze(1)
            )
            found.append(hidden[chosen])
        return torch.stack(found)  # [K, M, D]

    def _run(self, cache: DynamicCache, tokens: Tensor, hidden: Tensor, **how: Any) -> Tensor:
        pairs = self._pairs(tokens, hidden)
        found = self.model(inputs_embeds=pairs, past_key_values=cache, use_cache=True, **how)
        return found.last_hidden_state

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self._logits

    def predicted_features(self, states: Tensor) -> Tensor | None:
        return states


class _MixedLayer(LlamaDecoderLayer):
    """A decoder layer whose attention reads embeddings beside hidden states: [..., 2 D] -> D."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool):
        super().__init__(config, 0)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            bias = narrow.bias is not None
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=bias)
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

    def _make(self, config: Eagle3Config) -> None:
        size, inner = config.hidden_size, self.model.config
        self.fc = nn.Linear((len(config.feature_layers) or 3) * size, size, bias=False)
        self.model.layers[0] = _MixedLayer(inner, config.norm_before_residual)
        self.norm = LlamaRMSNorm(size, eps=inner.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        return eagle3(config, tensors)

    def bind(self, target: PreTrainedModel) -> Self:
        self.config.feature_layers = self.config.feature_layers or mixed_layers(target)
        return super().bind(target)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return [target.get_input_embeddings()]

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as EAGLE-1 does: with the last feature and the token beside it, read by the
        target's own norm and output layer.

        The token must come through attention, which reads the pair itself at first: queries and
        keys make the same of embeddings, and a pair fits none as well as itself.

        Args:
            token_counts: [V], how often each token occurs in the corpus; `trimmed` keeps the most
                frequent ones.
        """
        _spread(self.model)
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
            each[..., size:].mul_(0.3)  # too little to change what fits best
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        norm = getattr(self.target.get_decoder(), "norm", None)
        if norm is not None:
            # What it multiplies by, whether it keeps that less 1, takes off a mean, or adds a bias.
            signs = torch.ones_like(norm.weight)
            signs[::2] = -1
            self.norm.weight.copy_((norm(signs) - norm(-signs)) * signs / 2)
        self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))

    def _first(self, features: Tensor) -> Tensor:
        return self.fc(super()._first(features)).to(self.dtype)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.embed(tokens), hidden], -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def predicted_features(self, states: Tensor) -> Tensor | None:
        return None


def _spread(model: nn.Module) -> None:
    """Random weights that keep the size of what passes through, however wide the layers are."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
