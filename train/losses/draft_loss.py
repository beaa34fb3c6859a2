"""The loss of a drafter, the same for all families: a sum over depths and positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads import OptionError, TrainableDrafter

from .chunked import IGNORED, KEPT_LOGITS, Teacher, summed_loss
from .divergences import LOSSES


def head_labels(
    tokens: Tensor, supervised: Tensor, depths: int, vocabulary: Tensor | None = None
) -> Tensor:
    """The label of every depth 1 … K at every position.

    Depth k starts from the target's feature at position t, from which the target itself predicts
    token t + 1, and predicts token t + k + 1:

        tokens      x0  x1  x2  x3  x4
        features    f0  f1  f2  f3  f4
        the target  x1  x2  x3  x4
        depth 1     x2  x3  x4   –   –
        depth 2     x3  x4   –   –   –

    Args:
        tokens: [B, T] int64.
        supervised: [B, T] bool, the tokens that may be labels.
        vocabulary: [Vd] the draft vocabulary, ascending; None for the target's.

    Returns:
        [K, B, T] int64 ids of the draft vocabulary; `IGNORED` where the label is past the row's
        end, not supervised, or not in the draft vocabulary.
    """
    ids = tokens
    if vocabulary is not None:
        ids = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
        supervised = supervised & (vocabulary[ids] == tokens)
    labels = ids.masked_fill(~supervised, IGNORED)  # [B, T]
    padded = functional.pad(labels, (0, depths + 1), value=IGNORED)  # [B, T + K + 1]
    length = tokens.shape[1]
    return torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, depths + 1)])


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each depth has: [K, B, T] -> [K]."""
    return (labels != IGNORED).flatten(1).sum(1)


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
        divergence = LOSSES[loss].divergence
        self.soft = None
        if divergence is not None:
            self.soft = divergence, Teacher(drafter.target, drafter.draft_vocabulary)
        # whether the target's final features are read
        self.needs_final = self.soft is not None or feature_weight > 0
        if feature_weight:
            empty = torch.empty(0, 0, drafter.config.hidden_size)
            if drafter.predicted_features(empty) is None:
                raise OptionError(
                    f"train.feature_weight is {feature_weight}, but {type(drafter).__name__} "
                    "predicts no features that could be compared with the target's; set it to 0."
                )

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
        if not labels.shape[1]:
            return zero_with_gradient(drafter.parameters())
        places = where.flatten().nonzero().squeeze(1)  # [M], among B * T
        teaching: Any = None if final is None else final.flatten(0, 1)  # [B * T, D]
        predicted = drafter.predicted_features(states) if self.feature_weight else None
        width = drafter.config.vocab_size
        if self.soft is None and drafter.draft_vocabulary is not None:
            width = len(drafter.draft_vocabulary)
        recompute = labels.numel() * width > self.kept and torch.is_grad_enabled()
        total = states.new_zeros((), dtype=torch.float32)
        for k, wanted in enumerate(labels, start=1):  # [M]
            # Past a row's end this is the next row's place, but there the label is ignored.
            ahead = (places + k).clamp(max=where.numel() - 1)  # [M]
            nats = summed_loss(
                drafter.draft_logits(k), states[k - 1], wanted,
                None if self.soft is None else (*self.soft, teaching, ahead),
                max(self.kept // width, 1), recompute, self.preserve_rng_state,
            )  # fmt: skip
            if predicted is not None:
                # With the soft cross entropy and weight 10 the loss of EAGLE-1 (arXiv 2401.15077).
                distance = functional.smooth_l1_loss(
                    predicted[k - 1].float(), teaching[ahead].float(), reduction="none"
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
