"""A loss summed over positions, in chunks that bound the memory.

Tensors as wide as the vocabulary exist for one chunk of positions at a time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headstart.heads.core import OutputLayer

from .divergences import Divergence

IGNORED = -100
"""The label of a position that is left out of the loss."""

KEPT_LOGITS = 9 * 2**20
"""How many logits may stay in memory until the backward pass; if there are more, they are computed
in chunks, and again in the backward pass.

In float32 they are a little more than the 32 MiB from which on glibc returns freed memory at once.
Smaller chunks go to its heap, which fragmented to ten times what was in use.
"""


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


SoftTarget = tuple[Divergence, Teacher, Tensor, Tensor]
"""A divergence, a teacher, final features [N, D], and [M] the places among them to compare with."""


def summed_loss(
    read: Callable[[Tensor], Tensor],
    states: Tensor,
    labels: Tensor,
    soft_target: SoftTarget | None,
    size: int,
    recompute: bool,
    preserve_rng_state: bool,
) -> Tensor:
    """The sum of a loss over M positions, of which `size` at a time are given logits.

    Args:
        read: states [m, D'] -> logits [m, Vd].
        states: [M, D'].
        labels: [M]; `IGNORED` where a position does not count.
        soft_target: None for the cross entropy with the labels.
        recompute: drop the logits, and compute them again in the backward pass.
    """
    run = _chunk_loss
    if recompute:
        how = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        run = partial(checkpoint, _chunk_loss, **how)
    total = states.new_zeros((), dtype=torch.float32)
    for first in range(0, len(states), size):
        # Chunks of one size reuse each other's memory, so the last one repeats some positions.
        start = max(min(first, len(states) - size), 0)
        part, wanted = slice(start, start + size), labels[start : start + size].clone()
        wanted[: first - start] = IGNORED
        soft = None if soft_target is None else (*soft_target[:3], soft_target[3][part])
        total = total + run(read, states[part], wanted, soft)
    return total


def _chunk_loss(
    read: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, soft: SoftTarget | None
) -> Tensor:
    logits = read(states)  # [M, Vd]
    if soft is None:
        return summed_cross_entropy(logits.device.type)(logits, labels)
    divergence, teacher, final, places = soft
    logits = logits.float()
    log_p = teacher(final.index_select(0, places))  # [M, Vd]
    return divergence(log_p, logits.log_softmax(-1)).masked_fill(labels == IGNORED, 0.0).sum()


@cache
def summed_cross_entropy(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The summed cross entropy of logits [M, Vd] and labels [M], for a type of devices.

    On `cuda` it is liger_kernel's where that is installed: it makes no float32 copy of the logits
    and writes their gradient over them.
    """
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        fused = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        return partial(fused, ignore_index=IGNORED, reduction="sum")
    entropy = partial(functional.cross_entropy, ignore_index=IGNORED, reduction="sum")
    return lambda logits, labels: entropy(logits.float(), labels)
