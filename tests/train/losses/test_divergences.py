"""Divergences, with numbers that can be worked out by hand."""

import math

import pytest
import torch

from headstart.train.losses import LOSSES
from headstart.train.recipe import Train

LN2 = math.log(2)


def test_a_recipe_can_name_every_loss() -> None:
    for name, loss in LOSSES.items():
        assert name == loss.name == Train(loss=name).loss


# p = (1/2, 1/2) and q = (1/4, 3/4), in nats.
PINNED = {
    "soft_cross_entropy": (math.log(4) + math.log(4 / 3)) / 2,
    "forward_kl": (math.log(4) + math.log(4 / 3)) / 2 - LN2,
    "reverse_kl": math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4,
    "jensen_shannon": (
        math.log(4 / 3) / 2 + math.log(4 / 5) / 2 + math.log(2 / 3) / 4 + 3 * math.log(6 / 5) / 4
    )
    / 2,
    "total_variation": 1 / 4,
    "acceptance": math.log(4 / 3),
}
SOFT = [name for name, loss in LOSSES.items() if loss.divergence is not None]


@pytest.mark.parametrize("name", SOFT)
def test_pinned_divergences(name: str) -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    divergence = LOSSES[name].divergence
    assert divergence is not None
    assert divergence(p, q).item() == pytest.approx(PINNED[name], rel=1e-5)
    nothing = LN2 if name == "soft_cross_entropy" else 0.0
    assert divergence(p, p).item() == pytest.approx(nothing, abs=1e-6)


@pytest.mark.parametrize("name", SOFT)
def test_divergences_stay_finite_far_apart(name: str) -> None:
    """A point mass against another: what float32 cannot hold must not become NaN."""
    divergence = LOSSES[name].divergence
    assert divergence is not None
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = divergence(torch.tensor([[0.0, -500.0]]), logits.log_softmax(-1))
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
