"""The loss of a drafter, the same for all families: a sum over depths and positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads import OptionError, TrainableDrafter
from headstart.heads.core import gathered, output_layer, uniform

from .comparisons import (
    IGNORED,
    HardLabels,
    SoftLabels,
    rows_at_once,
    target_probabilities,
)
from .divergences import loss_of
from .fused import label_probabilities, summed_loss
from .room import Room
from .teacher import Teacher


def head_labels(
    tokens: Tensor,
    supervised: Tensor,
    depths: int,
    vocabulary: Tensor | None = None,
    segments: Tensor | None = None,
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
        segments: [B, T] the number of each token's document, where rows hold several.

    Returns:
        [K, B, T] int64 ids of the draft vocabulary; `IGNORED` where the label is past the row's
        end, of another document, not supervised, or not in the draft vocabulary.
    """
    ids = tokens
    if vocabulary is not None:
        ids = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
        supervised = supervised & (vocabulary[ids] == tokens)
    labels = ids.masked_fill(~supervised, IGNORED)  # [B, T]
    padded = functional.pad(labels, (0, depths + 1), value=IGNORED)  # [B, T + K + 1]
    length = tokens.shape[1]
    found = torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, depths + 1)])
    if segments is None:
        return found
    padded = functional.pad(segments, (0, depths + 1), value=-1)  # [B, T + K + 1]
    there = torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, depths + 1)])
    return found.masked_fill(there != segments, IGNORED)


def unbroken(labels: Tensor, supervised: Tensor) -> Tensor:
    """Labels [K, B, T] up to which all tokens since x_t+1 are supervised; `IGNORED` elsewhere.

    A round begins with a token that the target wrote, and ends where its answer does:

        supervised   –   –   x2  x3  x4  –   x6
        position 0   a block begins with x1, which is not
        position 1   x3  x4  –   –               x6 is behind a gap

    Args:
        supervised: [B, T] bool.
    """
    depths, length = len(labels), labels.shape[2]
    padded = functional.pad(supervised, (0, depths + 1), value=False)  # [B, T + K + 1]
    ahead = torch.stack([padded[:, k : k + length] for k in range(1, depths + 2)])
    return labels.masked_fill(ahead.byte().cumprod(0)[1:] == 0, IGNORED)


def some_starts(labels: Tensor, tokens: Tensor, supervised: Tensor, most: int, step: int) -> Tensor:
    """Labels [K, B, T] of `most` positions a row at most, chosen at random; `IGNORED` elsewhere.

    The choice depends on the row's supervised tokens and on the step alone, so it is the same in
    any batch.
    """
    length = tokens.shape[1]
    if length <= most:
        return labels
    counted = (labels != IGNORED).any(0)  # [B, T]
    seeds = (tokens * supervised).sum(1)
    when = torch.full_like(seeds, step).unsqueeze(1)
    order = uniform(seeds, when, torch.arange(length, device=tokens.device)).squeeze(1)  # [B, T]
    chosen = order.masked_fill(~counted, -1.0).topk(most).indices
    kept = torch.zeros_like(counted).scatter(1, chosen, True)
    return labels.masked_fill(~kept, IGNORED)


def thinned_depths(
    labels: Tensor,
    tokens: Tensor,
    supervised: Tensor,
    shares: Sequence[float],
    step: int,
    segments: Tensor | None = None,
) -> Tensor:
    """Labels [K, B, T] of each depth at a random share of the positions; `IGNORED` elsewhere.

    Where a depth is kept, all before it are. The choice depends on the document's supervised tokens
    and on the step alone, so it is the same in any batch, packed or not.

    Args:
        shares: [K], none larger than the one before.
        segments: as in `head_labels`.
    """
    every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [B, T]
    document = torch.zeros_like(every) if segments is None else segments.clamp(min=0).long()
    words = torch.zeros_like(every).scatter_add(1, document, tokens * supervised)
    first = torch.full_like(every, tokens.shape[1]).scatter_reduce(1, document, every, "amin")
    seeds, places = words.gather(1, document), every - first.gather(1, document)
    when = torch.tensor([step], device=tokens.device)
    drawn = uniform(seeds.flatten(), places.flatten().unsqueeze(1), when).view(tokens.shape)
    dropped = [drawn >= share for share in shares[: len(labels)]]
    return labels.masked_fill(torch.stack(dropped), IGNORED)


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each depth has: [K, B, T] -> [K]."""
    return (labels != IGNORED).flatten(1).sum(1)


SMOOTHING = 0.1
"""α of `acceptance_weights`, so that depths behind a poor one keep some weight."""


def acceptance_weights(probabilities: Tensor, counts: Tensor) -> Tensor:
    """What the expected number of accepted drafts gains from each depth's log-probability.

    That is D-PACE's weight (arXiv 2605.18810). All drafts up to depth m are accepted with about the
    product P_m of the probabilities of their labels, each smoothed to α + (1 - α) q. Depth k has
    the weight P_k + … + P_K: all those products have its factor.

    Args:
        probabilities: [K, M] of the labels.
        counts: [K, M] bool, where there is a label; others add no product.

    Returns:
        [K, M].

    Probabilities 4/9 and 4/9 are smoothed to 1/2, so the products are 1/2 and 1/4:

    >>> acceptance_weights(torch.full((2, 1), 4 / 9), torch.ones(2, 1) > 0).flatten().tolist()
    [0.75, 0.25]
    """
    smoothed = SMOOTHING + (1 - SMOOTHING) * probabilities * counts
    products = smoothed.cumprod(0) * counts
    return products.flip(0).cumsum(0).flip(0)


def confidence_weights(probabilities: Tensor) -> Tensor:
    """What the target's own probabilities say of whether a depth will matter.

    That is the weight of PARD-2's confidence-adaptive tokens (arXiv 2605.08632): the product of the
    probabilities of the labels of all depths before, so 1 for the first. Its authors divide by the
    sum of the weights, which is a factor for all depths alike.

    Args:
        probabilities: [K, M] of the labels, the target's; 0 where there is none.

    Returns:
        [K, M].

    >>> confidence_weights(torch.tensor([[0.5], [0.25], [1.0]])).flatten().tolist()
    [1.0, 0.5, 0.125]
    """
    return torch.cat([torch.ones_like(probabilities[:1]), probabilities[:-1].cumprod(0)])


class DraftLoss:
    """The sum over depths k = 1 … K of decay**k times the depth's mean loss.

    Depth k at position t is compared with the label x_t+k+1 or, if the loss is a divergence, with
    the distribution that the target computes from its final feature at position t + k. To that of a
    drafter that chooses among its best tokens the loss of the choice is added, see `draft_choice`.

    Args:
        drafter: bound to its target.
        loss: see `loss_of`.
        feature_weight: weight of the distance between the drafter's `predicted_features` and the
            target's final ones, which is added to each position's loss.
        size: see `rows_at_once`; as it says when None.
        weights: by which each position's loss is also multiplied at each depth: none, those of
            `acceptance_weights` or of `confidence_weights`. They have no gradient.

    Attributes:
        by_depth: [K], of the last batch each depth's mean loss, without gradient: neither times
            `decay**k`, nor with the features' distance or the loss of a choice.
        hits: [2, K] int64, of the last batch how many labels were the drafter's most likely token
            at each depth, and how many labels there were. Of a drafter that chooses among its best
            tokens it is the token that it chooses.

    Raises:
        OptionError: see `Teacher`; or the drafter predicts no features.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        decay: float,
        loss: str | Mapping[str, float] = "cross_entropy",
        feature_weight: float = 0.0,
        size: int | None = None,
        weights: str = "none",
    ):
        self.drafter, self.decay, self.feature_weight = drafter, decay, feature_weight
        self.kind, self.size, self._teacher = loss_of(loss), size, None
        self.weights = weights
        self.by_depth, self.hits = torch.empty(0), torch.empty(2, 0, dtype=torch.int64)
        self._room = Room()  # kept on a CPU
        if self.kind.divergence is not None or weights == "confidence":
            self._teacher = Teacher(drafter.target, drafter.draft_vocabulary)
        shared = getattr(drafter.config, "output", None) == "shared"
        # The target's output layer, where it is read here: as often as this process has chunks.
        self._layer = output_layer(drafter.target) if self._teacher or shared else None
        # whether the target's final features are read
        self.needs_final = self._teacher is not None or feature_weight > 0
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
        positions: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch, float32 scalar; 0 with zero gradients when there is no label.

        The means are over `counts`, not over this batch, so the gradients of micro-batches and of
        processes add up to that of the whole batch, however it is split.

        Args:
            features: [B, T, F]; tokens: [B, T].
            labels: [K, B, T], see `head_labels`.
            counts: [K, …], each depth's labels in the whole step of the optimizer, `label_counts`.
            final: [B, T, D], the target's final features, where `needs_final`.
            positions: see `TrainableDrafter.draft_hidden_states`.
        """
        with gathered(self._layer):
            return self._of(features, tokens, labels, counts, final, positions)

    def _of(
        self,
        features: Tensor,
        tokens: Tensor,
        labels: Tensor,
        counts: Tensor,
        final: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        drafter = self.drafter
        where = (labels != IGNORED).any(0)  # [B, T]
        asked = {} if positions is None else {"positions": positions}
        labels = labels[:, where]  # [K, M]
        if drafter.depth_shares is not None:
            asked["wanted"] = labels != IGNORED
        states = drafter.draft_hidden_states(
            features, tokens, where, len(labels), **asked
        )  # [K, M, D']
        counted = counts[: len(labels)].clamp(min=1)
        if not labels.shape[1]:
            self.by_depth = torch.zeros(len(labels), device=counts.device)
            self.hits = labels.new_zeros(2, len(labels))
            return zero_with_gradient(drafter.parameters())
        depths = torch.arange(1, len(labels) + 1, device=counts.device)  # [K]
        factors = self.decay ** depths.to(torch.promote_types(states.dtype, torch.float32))
        factors = factors / counted
        # Past a row's end this is the next row's place, but there the label is ignored.
        places = where.flatten().nonzero().squeeze(1)  # [M], among B * T
        ahead = (places + depths.unsqueeze(1)).clamp(max=where.numel() - 1)  # [K, M]
        teaching: Any = None if final is None else final.flatten(0, 1)  # [B * T, D]
        size = self.size or rows_at_once(self.kind, self._width(), states.device)
        room = self._room if states.device.type == "cpu" else Room()
        outputs = [drafter.draft_output(k) for k in range(1, len(labels) + 1)]
        choices = [each for k in range(len(labels)) if (each := drafter.draft_choice(k + 1))]
        if choices:
            outputs = [alone for alone, _ in choices]
        hard = HardLabels(labels, size, room, fused=self.weights == "none")
        weights = None  # [K, M]
        if self.weights == "acceptance":
            found = label_probabilities(outputs, states, hard)
            weights = acceptance_weights(found, labels != IGNORED)
        elif self.weights == "confidence":
            assert self._teacher is not None
            given = target_probabilities(self._teacher, teaching, ahead, labels, size)
            weights = confidence_weights(given)
        comparison = hard
        if self.kind.divergence is not None:
            assert self._teacher is not None
            comparison = SoftLabels(self.kind, self._teacher, teaching, ahead, labels, size, room)
        total, sums, hits = summed_loss(outputs, states, factors, comparison, weights)
        self.by_depth = sums / counted
        if choices:
            outputs = [chosen for _, chosen in choices]
            hard = HardLabels(labels, size, room, fused=False)
            there = label_probabilities(outputs, states.detach(), hard) > 0  # among the candidates
            hard = HardLabels(labels.masked_fill(~there, IGNORED), size, room, fused=False)
            of_choice, _, hits = summed_loss(outputs, states, factors, hard, weights)
            total = total + of_choice
        self.hits = torch.stack([hits, label_counts(labels)])
        if self.feature_weight:
            # With the soft cross entropy and weight 10 the loss of EAGLE-1 (arXiv 2401.15077).
            predicted: Any = drafter.predicted_features(states)  # [K, M, D]
            for k, wanted in enumerate(labels):
                distance = functional.smooth_l1_loss(
                    predicted[k].float(), teaching[ahead[k]].float(), reduction="none"
                ).mean(-1)  # [M]
                if weights is not None:
                    distance = distance * weights[k]
                distance = distance.masked_fill(wanted == IGNORED, 0.0).sum()
                total = total + self.feature_weight * factors[k] * distance
        return total

    def _width(self) -> int:
        """Vd of the drafter's logits."""
        known = self.drafter.draft_vocabulary
        return self.drafter.config.vocab_size if known is None else len(known)


def zero_with_gradient(parameters: Iterable[Tensor]) -> Tensor:
    """Zero, with a gradient of zeros for every parameter.

    Data-parallel training waits for a gradient of every parameter, used or not.
    """
    return torch.stack([parameter.float().sum() * 0.0 for parameter in parameters]).sum()
