"""Early exit: the target's own first layers draft, and the whole target verifies.

The first E layers run over drafted tokens in a cache of their own, with the target's weights. With
its name alone (`early_exit`) the target's last norm and output layer read what they leave
(LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710), as with `assistant_early_exit` of transformers:
this needs a target that was trained for it. For any other one a drafter is trained that reads the
exit by K decoder layers, a norm and, where it is trimmed, an output layer of its own (Kangaroo, Liu
et al. 2024, arXiv 2404.18911):

    token x_t+1 -> layers 0 … E-1 of the target -> h_t+1 -> own layers -> norm -> predicts x_t+2

The hidden states of a text's own tokens are the target's features, so training runs its own layers
alone, once over the text.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .core import OptionError, decoder_layers
from .declared.early_exit import EarlyExitFields
from .drafter import DrafterConfig, Step, last_true
from .parts.cached_layers import CachedLayers, DraftCache
from .parts.first_layers import FirstLayers
from .parts.own_layers import (
    attending_layers,
    llama_like,
    norm_scale,
    own_layers,
    silence,
    unit_scale_init,
)
from .parts.published.kangaroo import kangaroo
from .parts.recompute import compute_again
from .parts.vocabulary import OneOutputLayer
from .parts.weightless import load_without_weights, save_without_weights

_SHARE, _SHARE_ALONE = 16, 4
"""By default the exit is after a 16th of the target's layers, as Kangaroo's after 2 of 32; with no
layer of its own after a quarter, as LayerSkip's after 8 of 32. Not before the first one that
attends, though."""


@strict
class EarlyExitConfig(EarlyExitFields, DrafterConfig):
    """See `EarlyExitFields`."""

    model_type = "headstart_early_exit"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        count = len(decoder_layers(target))
        if config.exit_layer >= count:
            raise OptionError(
                f"drafter.exit_layer is {config.exit_layer}; the target has {count} layers: "
                f"expected 1 … {count - 1}."
            )
        share = _SHARE if config.layers else _SHARE_ALONE
        attending = attending_layers(target.config, alone=False)  # one of which is needed
        least = min(next(iter(attending), 0) + 1, count - 1)
        config.exit_layer = config.exit_layer or max(least, count // share)
        config.feature_layers = [config.exit_layer]
        if config.layers:
            config.layer = config.own_layer(llama_like(target), num_hidden_layers=config.layers)
        return config


@dataclass
class EarlyExitState:
    """The caches of a request."""

    first: DraftCache  # of the target's first layers
    own: Any  # a `DraftCache` of the drafter's own layers, where it has some


class EarlyExit(OneOutputLayer):
    """The target's first layers, and those of its own that read what they leave."""

    config_class = EarlyExitConfig
    config: EarlyExitConfig
    in_target, after_name = True, "exit_layer"
    from_checkpoint = staticmethod(kangaroo)

    def __init__(self, config: EarlyExitConfig):
        super().__init__(config)
        self._own: CachedLayers | None = None
        if config.layers:
            self.model, shapes = own_layers(config.layer or {})
            self._own = CachedLayers(self.model, shapes)
            self.norm = LlamaRMSNorm(config.hidden_size, eps=self.model.config.rms_norm_eps)
        if config.output == "trimmed":
            self.lm_head = nn.Linear(config.hidden_size, config.output_size, bias=False)
        self.post_init()

    @classmethod
    def of_target(cls, target: PreTrainedModel, exit_layer: int = 0) -> Self:
        """The drafter without layers of its own, for a target that was trained for early exits.

        Raises:
            OptionError: the target has no layer after `exit_layer` layers.
        """
        config = EarlyExitConfig.for_target(target, exit_layer=exit_layer, layers=0)
        return cls(config)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load it as transformers does, or without weights where it has none."""
        config: Any = options.get("config")
        if config is None:
            kind: Any = cls.config_class
            config = kind.from_pretrained(name, local_files_only=Path(name).is_dir())
        whole = super().from_pretrained if config.layers else partial(load_without_weights, cls)
        return whole(name, *args, **options)

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        if self._own is None:
            save_without_weights(self, folder)
        else:
            super().save_pretrained(folder, **options)

    def bind(self, target: PreTrainedModel) -> Self:
        super().bind(target)
        self._first = FirstLayers(target, self.config.exit_layer, norm=self._own is None)
        return self

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        layers = decoder_layers(target)[: self.config.exit_layer]
        return [target.get_input_embeddings(), *layers, *super().shared_modules(target)]

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as an early exit without layers of its own: they add nothing yet, and norm and
        output layer are copies of the target's."""
        unit_scale_init(self.model)
        silence(self.model)
        if (scale := norm_scale(self.target)) is not None:
            self.norm.weight.copy_(scale)
        if self.config.output == "trimmed":
            self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))

    @property
    def needs_length_bound(self) -> bool:
        own = self._own is not None and self._own.needs_length_bound
        return own or self._first.cached.needs_length_bound

    def start(self, batch: int, capacity: int) -> EarlyExitState:
        own = None if self._own is None else self._own.start(batch)
        return EarlyExitState(self._first.start(batch), own)

    def reserve(self, state: EarlyExitState, longest: int, room: int) -> None:
        self._first.cached.reserve(state.first, longest, room)
        if self._own is not None:
            self._own.reserve(state.own, longest, room)

    def prefill(
        self, state: EarlyExitState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        self._first.cached.prefill(state.first, count, input_ids=tokens)
        if self._own is not None:  # the features are what the first layers have just left
            self._own.prefill(state.own, count, inputs_embeds=features.to(self.dtype))

    def begin(self, state: EarlyExitState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        with self._first.fused:
            found = self._first.cached.begin(state.first, count, input_ids=tokens)
        if self._own is not None:
            hidden = found.last_hidden_state.to(self.dtype)  # [B, A, D]
            found = self._own.begin(state.own, count, inputs_embeds=hidden)
        return self._proposals(last_true(found.last_hidden_state, count).unsqueeze(1))

    def extend(self, state: EarlyExitState, tokens: Tensor, parent: Tensor) -> Step:
        with self._first.fused:
            found = self._first.cached.extend(state.first, parent, input_ids=tokens)
        if self._own is not None:
            hidden = found.last_hidden_state.to(self.dtype)  # [B, W, D]
            found = self._own.extend(state.own, parent, inputs_embeds=hidden)
        return self._proposals(found.last_hidden_state)

    def _proposals(self, hidden: Tensor) -> Step:
        return self.propose(hidden if self._own is None else self.norm(hidden))

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Depth k at position t is what its own layers leave at t + k: [depths, M, D]."""
        found = self.model(
            inputs_embeds=features.to(self.dtype), position_ids=positions, use_cache=False
        )
        hidden = self.norm(found.last_hidden_state)
        return torch.stack([hidden.roll(-depth, 1)[where] for depth in range(1, depths + 1)])

    def checkpoint_activations(self) -> bool:
        compute_again(self.model.layers)
        return True
