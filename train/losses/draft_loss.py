"""The loss of a drafter: sums over depths and positions, in chunks that bound the memory.

It is the same for all families: a drafter answers `draft_hidden_states` and `draft_logits`. Tensors
as wide as the vocabulary exist for one chunk of positions at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headstart.heads import Drafter, OptionError

from .divergences import LOSSES, Divergence, forward_kl
from .labels import IGNORED
from .teacher import Teacher

KEPT_LOGITS = 9 * 2**20
"""How many logits may stay in memory until the backward pass; if there are more, they are computed
in chunks, and again in the backward pass.

In float32 they are a little more than the 32 MiB from which on glibc returns freed memory at once.
Smaller chunks go to its heap, which fragmented to ten times what was in use.
"""

SoftTarget = tuple[Divergence, Teacher, Tensor, Tensor]
"""A divergence, a teacher, final features [N, D], and [M] the places among them to compare with."""


class DraftLoss:
    """The sum over depths k = 1 … K of decay**k times the depth's mean loss.

    Depth k at position t is compared with the label x_t+k+1 or, if the loss is a divergence, with
    the distribution that the target computes from its final feature at position t + k.

    Args:
        drafter: bound to its target.
        loss: a name in `LOSSES`.
        feature_weight: weight of the distance between the drafter's `predicted_features` and the
            target's final ones, which is added to each position's loss.
        kept: see `KEPT_LOGITS`.
        preserve_rng_state: whether logits that are computed again see the same dropout; for a
            drafter whose output layer has dropout.

    Raises:
        OptionError: see `Teacher`; or the drafter predicts no features.
    """

    def __init__(
        self,
        drafter: Drafter,
        decay: float,
        loss: str = "cross_entropy",
        feature_weight: float = 0.0,
        kept: int = KEPT_LOGITS,
        preserve_rng_state: bool = False,
    ):
        self.drafter, self.decay, self.feature_weight = drafter, decay, feature_weight
        self.kept, self.preserve_rng_state = kept, preserve_rng_state
        self.divergence, self.teacher = LOSSES[loss].divergence, None
        if self.divergence is not None:
            self.teacher = Teacher(drafter.target, drafter.draft_vocabulary)
        empty = torch.empty(0, 0, drafter.config.hidden_size)
        if feature_weight and drafter.predicted_features(empty) is None:
            raise OptionError(
                f"train.feature_weight is {feature_weight}, but {type(drafter).__name__} predicts "
                "no features that could be compared with the target's; set it to 0."
            )

    @property
    def needs_final(self) -> bool:
        """Whether it reads the target's final features."""
        return self.teacher is not None or self.feature_weight > 0

    def __call__(
        self,
        features: Tensor,
        tokens: Tensor,
        labels: Tensor,
        counts: Tensor,
        final: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch, float32 scalar; 0 with zero gradients when there is no label.

        The means are over `counts`, not over this batch, so the gradients of micro-batches and of
        processes add up to that of the whole batch, however it is split.

        Args:
            features: [B, T, F]; tokens: [B, T].
            labels: [K, B, T], see `head_labels`.
            counts: [K], each depth's labels in the whole optimizer step, see `label_counts`.
            final: [B, T, D], the target's final features, where `needs_final`.
        """
        drafter, divergence, teacher = self.drafter, self.divergence, self.teacher
        where = (labels != IGNORED).any(0)  # [B, T]
        states = drafter.draft_hidden_states(features, tokens, where, len(labels))  # [K, M, D']
        labels = labels[:, where]  # [K, M]
        depths, positions = labels.shape
        if not positions:
            return zero_with_gradient(drafter.parameters())
        weights = [self.decay**k / counts[k - 1].clamp(min=1) for k in range(1, depths + 1)]
        places = where.flatten().nonzero().squeeze(1)  # [M], among B * T
        # Past a row's end this is the next row's place, but there the label is ignored.
        ahead = [(places + k).clamp(max=where.numel() - 1) for k in range(1, depths + 1)]
        final = None if final is None else final.flatten(0, 1)  # [B * T, D]
        total = states.new_zeros((), dtype=torch.float32)
        if self.feature_weight:
            predicted = drafter.predicted_features(states)  # [K, M, D]
            assert predicted is not None and final is not None
            for k in range(depths):
                distance = feature_distance(predicted[k], final.index_select(0, ahead[k]))  # [M]
                distance = distance.masked_fill(labels[k] == IGNORED, 0.0).sum()
                total = total + self.feature_weight * weights[k] * distance
        width = drafter.config.vocab_size
        if self.divergence is None and drafter.draft_vocabulary is not None:
            width = len(drafter.draft_vocabulary)
        recompute = depths * positions * width > self.kept and torch.is_grad_enabled()
        for k in range(depths):
            soft_target = None
            if self.divergence is not None:
                assert self.teacher is not None and final is not None
                soft_target = self.divergence, self.teacher, final, ahead[k]
            nats = summed_loss(
                drafter.draft_logits(k + 1), states[k], labels[k], soft_target,
                max(self.kept // width, 1), recompute, self.preserve_rng_state,
            )  # fmt: skip
            total = total + weights[k] * nats
        return total


def base_kl(
    teacher: Teacher,
    layer: nn.Module,
    base: Tensor,
    adapted: Tensor,
    count: Tensor,
    kept: int = KEPT_LOGITS,
) -> Tensor:
    """The mean KL(base ‖ adapted) in nats a position: how far an adapted target moved.

    It is the self-distillation loss of Medusa-2 (arXiv 2401.10774).

    Args:
        teacher: the base's, over the whole vocabulary.
        layer: the adapted target's output layer.
        base, adapted: [M, D], the final features without and with the adapter.
        count: scalar, the positions of the whole optimizer step.
        kept: see `KEPT_LOGITS`.
    """
    places = torch.arange(len(base), device=base.device)
    size = max(kept // teacher.layer.weight.shape[0], 1)
    recompute = len(base) > size and torch.is_grad_enabled()
    soft_target = forward_kl, teacher, base, places
    read = partial(teacher.logits, layer)
    nats = summed_loss(read, adapted, places, soft_target, size, recompute, True)
    return nats / count.clamp(min=1)


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
    total = states.new_zeros((), dtype=torch.float32)
    for part, repeated in chunks(len(states), size):
        wanted = labels[part]
        if repeated:
            wanted = wanted.clone()
            wanted[:repeated] = IGNORED
        soft = None if soft_target is None else (*soft_target[:3], soft_target[3][part])
        arguments = read, states[part], wanted, soft
        if recompute:
            total = total + checkpoint(
                _chunk_loss, *arguments, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
        else:
            total = total + _chunk_loss(*arguments)
    return total


def chunks(positions: int, size: int) -> Iterator[tuple[slice, int]]:
    """Slices that cover all positions, each with how many of its first ones it repeats.

    They are equally large, so that their tensors reuse each other's memory.

    >>> list(chunks(5, 2))
    [(slice(0, 2, None), 0), (slice(2, 4, None), 0), (slice(3, 5, None), 1)]
    """
    for first in range(0, positions, size):
        start = max(min(first, positions - size), 0)
        yield slice(start, start + size), first - start


def zero_with_gradient(parameters: Iterable[Tensor]) -> Tensor:
    """Zero, with a gradient of zeros for every parameter.

    Data-parallel training waits for a gradient of every parameter, used or not.
    """
    return torch.stack([parameter.float().sum() * 0.0 for parameter in parameters]).sum()


def feature_distance(predicted: Tensor, features: Tensor) -> Tensor:
    """The smooth L1 distance of features, the mean over their entries: [M, D], [M, D] -> [M].

    Added to the soft cross entropy with weight 10 it is the loss of EAGLE-1 (arXiv 2401.15077).
    """
    distance = functional.smooth_l1_loss(predicted.float(), features.float(), reduction="none")
    return distance.mean(-1)


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
