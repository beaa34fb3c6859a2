"""The losses that a recipe's `train.loss` can name, one record each, and weighted sums of them.

A divergence compares the target's distribution p with the drafter's q. Both are given as
log-probabilities, [M, Vd] each, and the result is in nats, [M]. A new loss is a function of both
and an entry of `LOSSES`. Nothing here imports torch, so recipes are checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Callable[["Tensor", "Tensor"], "Tensor"]


def soft_cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-sum p log q; it has the gradient of `forward_kl`."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q): the drafter covers every token that the target may choose."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q ‖ p): the drafter concentrates on tokens that are likely for the target.

    Like `total_variation` it has almost no gradient where p and q hardly overlap, so it is for
    drafters that are partly trained.
    """
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The mean of KL(p ‖ m) and KL(q ‖ m) for the mixture m = (p + q) / 2; at most log 2."""
    log_m = log_p.logaddexp(log_q) - math.log(2)
    return (forward_kl(log_p, log_m) + forward_kl(log_q, log_m)) / 2


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum |p - q| / 2: how often rejection sampling rejects a sampled draft (arXiv 2211.17192)."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum min(p, q), the probability of acceptance (LK losses, arXiv 2602.23881).

    Its gradient is that of `total_variation` divided by the acceptance, so a drafter that is rarely
    accepted still learns.
    """
    return -log_p.minimum(log_q).logsumexp(-1)


@dataclass(frozen=True)
class Loss:
    """A value of `train.loss`; the divergence is None for the cross entropy with the labels."""

    name: str
    divergence: Divergence | None
    difference: bool = False  # whether its gradient at the drafter's logits is q - p
    own: bool = False  # whether it adds sum p log p to -sum p log q then
    labels: float = 0.0  # weight of the cross entropy with the labels beside the divergence
    parts: int = 1  # divergences that are summed


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", None),
        Loss("soft_cross_entropy", soft_cross_entropy, difference=True),
        Loss("forward_kl", forward_kl, difference=True, own=True),
        Loss("reverse_kl", reverse_kl),
        Loss("jensen_shannon", jensen_shannon),
        Loss("total_variation", total_variation),
        Loss("acceptance", acceptance),
    )
}
"""Every loss, by name."""

WEIGHTS = ("none", "acceptance", "confidence")
"""The values of `train.position_weights`, see `DraftLoss`."""


def loss_of(value: str | Mapping[str, float]) -> Loss:
    """The loss that `train.loss` says: a name, or the weights of several that are added up.

    DSpark's 0.1 CE + 0.9 ‖p - q‖₁, which is twice the total variation:

    >>> loss = loss_of({"cross_entropy": 0.1, "total_variation": 1.8})
    >>> loss.name, loss.labels, loss.parts
    ('0.1 cross_entropy + 1.8 total_variation', 0.1, 1)
    """
    if isinstance(value, str):
        return LOSSES[value]
    weighted = [
        (weight, divergence)
        for name, weight in value.items()
        if (divergence := LOSSES[name].divergence) is not None
    ]

    def total(log_p: Tensor, log_q: Tensor) -> Tensor:
        first, *others = (weight * divergence(log_p, log_q) for weight, divergence in weighted)
        return sum(others, start=first)

    name = " + ".join(f"{weight:g} {name}" for name, weight in value.items())
    labels = value.get("cross_entropy", 0.0)
    return Loss(name, total, labels=labels, parts=len(weighted))
