"""The loss of a drafter, the same for all families: a sum over depths and positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads import OptionError, TrainableDrafter

from .chunked import KEPT_LOGITS, summed_loss
from .divergences import LOSSES
from .labels import IGNORED
from .teacher import Teacher


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
        drafter: TrainableDrafter,
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
        if feature_weight:
            empty = torch.empty(0, 0, drafter.config.hidden_size)
            if drafter.predicted_features(empty) is None:
                raise OptionError(
                    f"train.feature_weight is {feature_weight}, but {type(drafter).__name__} "
                    "predicts no features that could be compared with the target's; set it to 0."
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
        drafter = self.drafter
        where = (labels != IGNORED).any(0)  # [B, T]
        states = drafter.draft_hidden_states(features, tokens, where, len(labels))  # [K, M, D']
        labels = labels[:, where]  # [K, M]
        depths, positions = labels.shape
        if not positions:
            return zero_with_gradient(drafter.parameters())
        places = where.flatten().nonzero().squeeze(1)  # [M], among B * T
        final = None if final is None else final.flatten(0, 1)  # [B * T, D]
        predicted = drafter.predicted_features(states) if self.feature_weight else None
        width = drafter.config.vocab_size
        if self.divergence is None and drafter.draft_vocabulary is not None:
            width = len(drafter.draft_vocabulary)
        recompute = depths * positions * width > self.kept and torch.is_grad_enabled()
        total = states.new_zeros((), dtype=torch.float32)
        for k in range(1, depths + 1):
            wanted = labels[k - 1]  # [M]
            # Past a row's end this is the next row's place, but there the label is ignored.
            ahead = (places + k).clamp(max=where.numel() - 1)  # [M]
            soft_target = None
            if self.divergence is not None:
                assert self.teacher is not None and final is not None
                soft_target = self.divergence, self.teacher, final, ahead
            nats = summed_loss(
                drafter.draft_logits(k), states[k - 1], wanted, soft_target,
                max(self.kept // width, 1), recompute, self.preserve_rng_state,
            )  # fmt: skip
            if predicted is not None:
                assert final is not None
                # With the soft cross entropy and weight 10 the loss of EAGLE-1 (arXiv 2401.15077).
                distance = functional.smooth_l1_loss(
                    predicted[k - 1].float(), final.index_select(0, ahead).float(), reduction="none"
                ).mean(-1)  # [M]
                distance = distance.masked_fill(wanted == IGNORED, 0.0)
                nats = nats + self.feature_weight * distance.sum()
            total = total + self.decay**k / counts[k - 1].clamp(min=1) * nats
        return total


def zero_with_gradient(parameters: Iterable[Tensor]) -> Tensor:
    """Zero, with a gradient of zeros for every parameter.

    Data-parallel training waits for a gradient of every parameter, used or not.
    """
    return torch.stack([parameter.float().sum() * 0.0 for parameter in parameters]).sum()
