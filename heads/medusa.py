"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): K independent heads on the final hidden state.

Head k (1 … K) reads the target's feature at token t and predicts token t + k + 1; the target's own
output layer predicts t + 1. A head is L residual blocks x + SiLU(Wx + b) and an output layer. All
heads live in one stacked parameter, so a round costs one batched product per block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from .core import each_product, runs_packed
from .declared.medusa import MedusaFields
from .drafter import DrafterConfig, Step, last_true
from .parts.published.medusa import MEDUSA, medusa
from .parts.vocabulary import TrimmedVocabulary
from .trainable import DraftLogits


@strict
class MedusaConfig(MedusaFields, DrafterConfig):
    """See `MedusaFields`."""

    model_type = "headstart_medusa"


class Medusa(TrimmedVocabulary):
    """K heads that answer for every depth from one `begin`."""

    config_class = MedusaConfig
    config: MedusaConfig
    independent = True
    from_checkpoint = staticmethod(medusa)
    exports = MEDUSA

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        heads, size = config.heads, config.hidden_size
        self.weight = nn.Parameter(torch.empty(config.layers, heads, size, size))
        self.bias = nn.Parameter(torch.empty(config.layers, heads, size))
        self.output: Any = None
        if config.output != "shared":
            self.output = nn.Parameter(torch.empty(heads, config.output_size, size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity, so a shared output layer starts as the target's own."""
        super()._init_weights(module)
        for parameter in self.parameters() if module is self else ():
            nn.init.zeros_(parameter)

    def own_rows(self, size: int) -> int:
        return self.config.heads * size

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Copy the target's output layer into the heads' own before training."""
        if self.output is not None:
            self.output.copy_(self.rows_to_start_from(token_counts).expand_as(self.output))

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        return self._blocks(features[where], depths)  # the heads read no tokens

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        if self.output is None:
            return self.target_logits
        return partial(F.linear, weight=self.output[depth - 1])

    def draft_output(self, depth: int) -> DraftLogits:
        if self.output is None:
            return super().draft_output(depth)
        return DraftLogits(weight=self.output, index=depth - 1)

    def begin(self, state: None, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        states = self._blocks(last_true(features, count), self.config.heads)  # [K, B, D]
        shared = self.output is None
        logits = self.target_logits(states) if shared else self._products(states, self.output)
        return Step(logits.transpose(0, 1), self.draft_vocabulary)  # [B, K, Vd]

    def _blocks(self, features: Tensor, heads: int) -> Tensor:
        """The first heads' states of features [M, D]: [heads, M, D]."""
        states = features.to(self.weight.dtype).expand(heads, -1, -1)
        for weight, bias in zip(self.weight[:, :heads], self.bias[:, :heads], strict=True):
            states = states + F.silu(self._products(states, weight, bias.unsqueeze(1)))
        return states

    def _products(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each head's states [K, M, D] by its own weight [K, out, D]: [K, M, out]."""
        if runs_packed(self) and (found := each_product(states, weight)) is not None:
            return found if bias is None else found + bias
        if bias is None:
            return torch.bmm(states, weight.mT)
        return torch.baddbmm(bias, states, weight.mT)
