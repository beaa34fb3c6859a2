"""EAGLE: one decoder layer that continues the target's features, one drafted token at a time.

At position t it reads the pair of the target's feature f_t and the next token x_t+1, attends to the
pairs before it in a cache of its own, and its hidden state predicts x_t+2. A drafted token is
paired with the hidden state of its parent.

    pair 0        pair 1        pair 2        drafted     drafted
    f_0 x_1       f_1 x_2       f_2 x_3       h_3 x_4     h_4 x_5
                                -> h_3: x_4   -> h_4: x_5 -> h_5: x_6

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) reads the final features, and its hidden state is the
next one, as well as it can predict it: the target's own output layer reads it. EAGLE-2 (arXiv
2406.16858) is the same drafter under best-first trees, `best-first:61,10,7` as published. EAGLE-3
is in `eagle3`.
"""

from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from .core import CACHE, AttentionWindows
from .declared.eagle import EagleFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.cached_layers import CachedLayers, DraftCache
from .parts.draft_attention import Mask, attention_for, chosen_positions, depth_mask
from .parts.own_layers import llama_like, own_layers, silence, unit_scale_init
from .parts.published.eagle import eagle1
from .parts.published.eagle_files import EAGLE1
from .parts.vocabulary import OneOutputLayer, TokenConditioned


@strict
class EagleConfig(EagleFields, DrafterConfig):
    """See `EagleFields`."""

    model_type = "headstart_eagle"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.layer = config.own_layer(llama_like(target))
        return config


class Past:
    """The keys and values of the depths so far: a cache or, where it is made anew for every depth
    because that may run twice, what is in it."""

    def __init__(self) -> None:
        self.cache = DynamicCache()
        self.states: list[Tensor] = []  # keys and values


class Eagle(OneOutputLayer, TokenConditioned):
    """EAGLE-1, and what EAGLE-3 has in common with it."""

    config_class = EagleConfig
    config: Any
    from_checkpoint = staticmethod(eagle1)
    exports = EAGLE1
    _checkpointed = False  # see `checkpoint_activations`

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.model, self._layers = self._own_layers(self.config.layer or {})
        self._mask_options: dict[str, Any] = {}  # of `depth_mask`
        self._make(config)
        self._windows = AttentionWindows.of(self.model)
        self.post_init()

    def _own_layers(self, layer: dict[str, Any]) -> tuple[Any, CachedLayers]:
        """The decoder layers that the config describes, and how they are run while decoding."""
        model, shapes = own_layers(layer)
        return model, CachedLayers(model, shapes)

    def _make(self, config: Any) -> None:
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.model.layers[0].input_layernorm = nn.Identity()
        if config.output != "shared":
            self.lm_head = nn.Linear(config.hidden_size, config.output_size, bias=False)

    @property
    def _embedding_size(self) -> int:
        return (self.config.layer or {}).get("hidden_size", self.config.hidden_size)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start by predicting what the target's output layer does: the decoder layer adds nothing
        yet to the feature and a little of the token."""
        unit_scale_init(self.model)
        silence(self.model)
        size = self.config.hidden_size
        token, feature = self.fc.weight.chunk(2, 1)
        token.normal_().div_(self.size_of_embeddings() * size**0.5)  # what is added is of size 1
        feature.copy_(torch.eye(size))
        if self.fc.bias is not None:
            self.fc.bias.zero_()
        if self.config.output != "shared":
            self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))

    def _first(self, features: Tensor) -> Tensor:
        """The target's features [..., F] as the hidden states of the first pairs: [..., D]."""
        return features.to(self.dtype)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input for tokens [...] and the hidden states before them [..., D]."""
        pairs = torch.cat([self.embed(tokens), hidden], -1)
        return self.fc(pairs).to(hidden.dtype)  # under autocast too: what is added to stays precise

    def _left(self, found: Any) -> Tensor:
        """The hidden states that the layers leave, which the next pairs and the output read."""
        return found.last_hidden_state

    @property
    def needs_length_bound(self) -> bool:
        return self._layers.needs_length_bound

    def start(self, batch: int, capacity: int) -> DraftCache:
        return self._layers.start(batch)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        # The root's pair stands one before the root itself.
        self._layers.reserve(state, longest - 1, room)

    def prefill(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        pairs = self._pairs(tokens[:, 1:], self._first(features[:, :-1]))
        self._layers.prefill(state, count - 1, inputs_embeds=pairs)

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        pairs = self._pairs(tokens, self._first(features))
        found = self._layers.begin(state, count, inputs_embeds=pairs)
        state.hidden = last_true(self._left(found), count).unsqueeze(1)  # [B, 1, D]
        return self.propose(state.hidden)

    def extend(self, state: DraftCache, tokens: Tensor, parent: Tensor) -> Step:
        above = entries_at(state.hidden, parent + 1)  # [B, W, D]
        pairs = self._pairs(tokens, above)
        hidden = self._left(self._layers.extend(state, parent, inputs_embeds=pairs))
        state.hidden = torch.cat([state.hidden, hidden], 1)
        return self.propose(hidden)

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Depth 1 runs on all pairs of the text; each deeper one continues every chosen position.

        At depth k the pair of position t is its hidden state of depth k - 1 and token x_t+k, at
        position t + k - 1. It attends to the text's pairs up to t and to its own of depths 2 … k:
        of the keys that a depth adds, to the one of its own position.
        """
        length = tokens.shape[1]
        packed = positions is not None
        at, positions, begin = chosen_positions(where, positions)
        chosen, start, past = where.gather(1, at), begin.gather(1, at), Past()  # [B, W]
        mask = self._mask(begin + positions, begin, length, 1) if packed else None
        # The last pair lacks its token: any will do, since no chosen state depends on it.
        first = self._first(features)
        hidden = self._run(past, tokens.roll(-1, 1), first, positions, mask)  # [B, T, D]
        found = [hidden[where]]
        hidden = entries_at(hidden, at)  # [B, W, D]
        own = positions.gather(1, at)  # [B, W]
        for depth in range(2, depths + 1):
            token = tokens.gather(1, (at + depth).clamp(max=length - 1))
            mask = self._mask(at, start, length, depth)
            hidden = self._run(past, token, hidden, own + depth - 1, mask)
            found.append(hidden[chosen])
        return torch.stack(found)  # [K, M, D]

    def _mask(self, at: Tensor, start: Tensor, length: int, depth: int) -> Mask | dict[str, Mask]:
        """See `depth_mask`; with one for each type of layer where some have a window."""

        def mask(window: int | None) -> Mask:
            first, past = start, 0
            if window is not None:
                first, past = start.clamp(min=at + depth - window), max(depth - window - 1, 0)
            return depth_mask(at, first, length, depth - 1, past=past, **self._mask_options)

        return self._windows.masks(mask)

    def checkpoint_activations(self) -> bool:
        self._checkpointed = True
        return True

    def _run(
        self, past: Past, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Any
    ) -> Tensor:
        """Run a depth after the others, whose keys and values are `past`: [B, W, D]."""
        if not self._checkpointed:
            return self._depth(past.cache, tokens, hidden, positions, mask)

        def depth(tokens: Tensor, hidden: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
            cache = DynamicCache()
            for number in range(len(before) // 2):
                cache.update(before[2 * number], before[2 * number + 1], number)
            found = self._depth(cache, tokens, hidden, positions, mask)
            layers: Any = cache.layers
            return found, *(kept for layer in layers for kept in (layer.keys, layer.values))

        found, *past.states = checkpoint(depth, tokens, hidden, *past.states, use_reentrant=False)
        return found

    def _depth(
        self,
        cache: DynamicCache,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Any,
    ) -> Tensor:
        with attention_for(self.model, mask):
            found = self.model(
                inputs_embeds=self._pairs(tokens, hidden), **{CACHE: cache}, use_cache=True,
                position_ids=positions, attention_mask=mask,
            )  # fmt: skip
        return self._left(found)

    def predicted_features(self, states: Tensor) -> Tensor | None:
        return states
