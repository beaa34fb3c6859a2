"""The drafters that Google publishes for Gemma 4: layers that read the target's keys and values.

A few decoder layers have queries alone. They attend to the keys and values of the target's last
layer of each type of attention that computes its own, of all committed tokens. A draft step reads
the target's embedding of a token and the hidden state before it, and leaves the next one:

    x_t+1 embedded ┐                                           ┌-> logits of x_t+2
                   ├-> pre_projection -> layers -> norm -> s --┤
    f_t or h_t     ┘         (keys and values of x_0 … x_t)    └-> post_projection -> h_t+1

The first step reads the target's final hidden state f_t. All steps of a round stay at the position
of x_t+1, and drafts have no keys, so a node of a tree needs its parent's hidden state alone.

The definition is transformers' `Gemma4AssistantForCausalLM`, driven by its
`SinglePositionMultiTokenCandidateGenerator` (release 5.23; ai.google.dev/gemma/docs/mtp/mtp). What
differs from it here:

- After a draft was rejected the generator still shows the step the key of that draft, at the
  position of x_t+1, and further ones where the target's cache of a window is full. Here, as in
  vLLM, keys are those of committed tokens alone.
- Where tokens are grouped by centroids, those of other groups have no logit (minus infinity), as
  in vLLM up to rounding; in transformers one that is lower by 1 than all others.
- vLLM and SGLang turn the queries to the position of x_t, transformers and this class to that of
  x_t+1.

The keys and values are computed again from the inputs of these layers, which are among the
features, by the target's own modules.
"""

from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checkpoint import Found
from .core import FINAL, LayerShape, OptionError, SlabCache, in_steps
from .declared.gemma4_assistant import Gemma4AssistantFields
from .drafter import Drafter, DrafterConfig, Step, entries_at, last_true
from .parts.cached_layers import DraftCache
from .parts.published.gemma4_assistant import check_rotary, gemma4_assistant
from .parts.query_layers import QueryLayers
from .parts.shared_keys import SharedKeys, head_sizes, storing_layers


@strict
class Gemma4AssistantConfig(Gemma4AssistantFields, DrafterConfig):
    """See `Gemma4AssistantFields`."""

    model_type = "headstart_gemma4_assistant"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        storing, sizes = storing_layers(target), head_sizes(target)
        config = super().for_target(target, **options)
        config.kinds = config.kinds or sorted(storing, reverse=True)
        config.head_dims = config.head_dims or {kind: sizes[kind][1] for kind in storing}
        numbers = [storing.get(kind, FINAL) for kind in sorted(set(config.kinds))]
        config.feature_layers = config.feature_layers or [FINAL, *numbers]
        return config


class _Grouped(nn.Module):
    """Which tokens have a logit: those of the groups whose centroids fit a state best."""

    token_ordering: Tensor

    def __init__(self, config: Gemma4AssistantConfig):
        super().__init__()
        self.count = config.top_centroids
        self.centroids = nn.Linear(config.width, config.centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    def forward(self, states: Tensor, rows: nn.Embedding) -> Tensor:
        """Logits [B, W, V] of states [B, W, W'], by the rows [V, W'] of an output layer."""
        best = self.centroids(states).topk(self.count, dim=-1).indices
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        ids = groups[best].flatten(-2)  # [B, W, tokens]
        logits = (rows(ids) @ states.unsqueeze(-1)).squeeze(-1)
        none = logits.new_full((*ids.shape[:-1], rows.num_embeddings), -torch.inf)
        return none.scatter(-1, ids, logits)


class Gemma4Assistant(Drafter):
    """An assistant of Gemma 4; not trained here."""

    config_class = Gemma4AssistantConfig
    config: Gemma4AssistantConfig
    from_checkpoint = staticmethod(gemma4_assistant)
    _shared: tuple[SharedKeys, ...] = ()  # of each type of attention, in alphabetical order

    def __init__(self, config: Gemma4AssistantConfig):
        super().__init__(config)
        wide, size = config.hidden_size, config.width
        self.model = QueryLayers(config)
        self.pre_projection = nn.Linear(2 * wide, size, bias=False)
        self.post_projection = nn.Linear(size, wide, bias=False)
        self.masked_embedding = _Grouped(config) if config.centroids else None
        self.lm_head: Any = (
            nn.Embedding(config.vocab_size, size)
            if config.centroids
            else nn.Linear(size, config.vocab_size, bias=False)
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _Grouped):
            module.token_ordering.copy_(torch.arange(len(module.token_ordering)))
        elif isinstance(getattr(module, "layer_scalar", None), Tensor):
            module.layer_scalar.fill_(1)  # type: ignore[operator, union-attr]

    @classmethod
    def completed(cls, found: Found, target: PreTrainedModel) -> Found:
        known, tensors = super().completed(found, target)
        text: Any = target.config.get_text_config(decoder=True)
        storing_layers(target)
        check_rotary(known["kinds"], known["rope_parameters"], text.rope_parameters)
        return {n: value for n, value in known.items() if n != "rope_parameters"}, tensors

    def bind(self, target: PreTrainedModel) -> Self:
        sizes, own = head_sizes(target), self.config
        for kind in self._kinds:
            heads, size = sizes.get(kind, (0, 0))
            if not heads or size != own.head_dims[kind] or own.query_heads % heads:
                keys = f"{heads} keys of size {size}" if heads else "none"
                raise OptionError(
                    f"its {own.query_heads} queries of {kind} have size {own.head_dims[kind]}, and "
                    f"the target has {keys}; load the target that the drafter was trained for."
                )
        self._shared = tuple(SharedKeys(target, kind) for kind in self._kinds)
        return super().bind(target)

    @property
    def needs_length_bound(self) -> bool:
        return True  # masks are as wide as the bound

    @property
    def _kinds(self) -> list[str]:
        return sorted(set(self.config.kinds))

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        shared = [part for one in self._shared for part in one.modules]
        return [target.get_input_embeddings(), *shared]

    def start(self, batch: int, capacity: int) -> DraftCache:
        sizes = head_sizes(self.target)
        shapes = [
            LayerShape(self.device, self.dtype, sizes[kind], sizes[kind]) for kind in self._kinds
        ]
        lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        return DraftCache(SlabCache(shapes, batch, 0), lengths)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        state.longest = longest
        state.reserve(longest + room)

    def prefill(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        state.slab.clear()
        state.slab.reserve(in_steps(tokens.shape[1]))
        state.lengths = torch.zeros_like(count)
        if tokens.shape[1] > 1:
            self._add(state, features[:, :-1], count - 1)

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        state.reserve(state.longest + tokens.shape[1])
        self._add(state, features, count)
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        final = last_true(features[..., : self.config.hidden_size], count)  # [B, D]
        states = self._states(state, root, final.unsqueeze(1))
        state.hidden = self.post_projection(states)  # [B, 1, D]
        return self._propose(states)

    def extend(self, state: DraftCache, tokens: Tensor, parent: Tensor) -> Step:
        states = self._states(state, tokens, entries_at(state.hidden, parent + 1))
        state.hidden = torch.cat([state.hidden, self.post_projection(states)], 1)
        return self._propose(states)

    def _propose(self, states: Tensor) -> Step:
        grouped = self.masked_embedding
        return Step(self.lm_head(states) if grouped is None else grouped(states, self.lm_head))

    def _add(self, state: DraftCache, features: Tensor, count: Tensor) -> None:
        """Keep the keys and values of committed tokens' features [B, A, F]; padding comes after the
        text, where nothing sees it and the next tokens overwrite it."""
        steps = torch.arange(features.shape[1], device=count.device)
        positions = state.lengths.unsqueeze(1) + steps  # [B, A]
        state.slab.set_slots(positions, state.slab.capacity)
        entering = features.split(self.config.hidden_size, -1)[1:]
        for number, (shared, hidden) in enumerate(zip(self._shared, entering, strict=True)):
            keys, values = shared(hidden.to(self.target.dtype), positions)
            state.slab.update(self._here(keys), self._here(values), number)
        state.lengths = state.lengths + count

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def _states(self, state: DraftCache, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the layers make of nodes with these tokens [B, W] and the hidden states before them
        [B, W, D]: [B, W, W']."""
        embedded: Any = self.target.get_input_embeddings()
        pairs = torch.cat([self._here(embedded(tokens)), hidden.to(self.dtype)], -1)
        mixed = self.pre_projection(pairs)  # [B, W, W']
        live, position = in_steps(state.longest), state.lengths.unsqueeze(1)  # [B, 1]
        read, masks, angles = {}, {}, {}
        for number, shared in enumerate(self._shared):
            keys, values = (each.narrow(2, 0, live) for each in state.slab.layer(number))
            read[shared.kind] = keys, values  # [B, H, S, d] each
            masks[shared.kind] = self._mask(position, live, shared.kind)
            angles[shared.kind] = shared.angles(mixed, position)
        return self.model(mixed, read, masks, angles)

    def _mask(self, position: Tensor, live: int, kind: str) -> Tensor:
        """What is added to the scores of keys at slots 0 … live - 1, [B, 1, 1, S]."""
        slots = torch.arange(live, device=position.device)
        seen = slots < position  # [B, S]
        if kind == "sliding_attention":
            seen = seen & (slots >= position - 1 - self.config.window)
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, lowest)
        return mask[:, None, None]
