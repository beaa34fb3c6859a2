"""The target's distribution, computed from its final features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads.core import OutputLayer


class Teacher:
    """Gives the target's log-probabilities at chosen positions, from its final features there.

    Args:
        vocabulary: [Vd] the draft vocabulary, to which the distribution is renormalised; None for
            the target's.

    Raises:
        OptionError: the target changes its output layer's logits in an unknown way.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None = None):
        self.output = OutputLayer(target, vocabulary)
        _ = self.output.finish  # found now, before an adapter changes the target

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        """Final features [M, D] -> log-probabilities [M, Vd], float32."""
        return self.logits(self.output.layer, features).float().log_softmax(-1)

    def logits(self, layer: nn.Module, features: Tensor) -> Tensor:
        """Final features [M, D] -> logits [M, Vd], through any output layer."""
        with torch.autocast(features.device.type, enabled=False):
            return self.output(features, layer)
