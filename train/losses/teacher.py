"""The target's own distribution at chosen positions, from its final features there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from headstart.heads.core import OutputLayer, device_of, offloaded, weight_of

from .room import Room, at_least_float32


class Teacher:
    """Gives the target's log-probabilities at chosen positions, from its final features there.

    Args:
        vocabulary: [Vd] the draft vocabulary, to which the distribution is renormalised; None for
            the target's. Its rows of the output layer are copied once, so no others are computed;
            but not the first ones, which is what a draft model with fewer tokens than the target
            knows.

    Raises:
        OptionError: the target changes its output layer's logits in an unknown way.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None = None):
        self.output = OutputLayer(target, vocabulary)
        _ = self.output.finish  # found now, before an adapter changes the target
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._first: int | None = None  # how many of the target's tokens, where it is the first
        if vocabulary is not None:
            count = len(vocabulary)
            first = torch.equal(vocabulary, torch.arange(count, device=vocabulary.device))
            self._first = count if first else None

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        """Final features [M, D] -> log-probabilities [M, Vd], in at least float32."""
        logits = self.logits(self.output.layer, features)
        return logits.log_softmax(-1, dtype=at_least_float32(logits))

    def logits(self, layer: nn.Module, features: Tensor, room: Room | None = None) -> Tensor:
        """Final features [M, D] -> logits [M, Vd], through any output layer.

        They may lie in the `room`, as "logits", where gradients are not recorded.
        """
        with torch.autocast(features.device.type, enabled=False):
            place = device_of(layer)
            if layer is self.output.layer and (rows := self._own_rows()) is not None:
                found = self.output.finish(_product(features.to(place), *rows, room))
            else:
                found = self.output(features.to(place), layer)
            return found.to(features.device)

    def _own_rows(self) -> tuple[Tensor, Tensor | None] | None:
        """The layer's weight [Vd, D] and bias [Vd]; None where only its forward has them."""
        layer, vocabulary = self.output.layer, self.output.vocabulary
        if type(layer) is not nn.Linear or offloaded(layer):
            return None
        if vocabulary is None or self._first is not None:
            bias = None if layer.bias is None else layer.bias[: self._first]
            return layer.weight[: self._first], bias
        if self._rows is None:
            bias = None if layer.bias is None else weight_of(layer, "bias")[vocabulary]
            self._rows = weight_of(layer)[vocabulary].detach(), bias
        return self._rows


def _product(features: Tensor, weight: Tensor, bias: Tensor | None, room: Room | None) -> Tensor:
    """The logits of a linear layer, in the room if there is one and it has no bias."""
    if room is None or bias is not None:
        return functional.linear(features, weight, bias)
    shape = len(features), len(weight)
    out = room.empty("logits", shape, features.dtype, features.device)
    return torch.mm(features, weight.mT, out=out)
