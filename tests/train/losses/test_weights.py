"""Weights of positions by the drafter's own probabilities, and sums of losses; by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.trainable import DraftLogits
from headstart.train.losses import WEIGHTS, loss_of
from headstart.train.losses.comparisons import IGNORED, HardLabels, tensors
from headstart.train.losses.draft_loss import (
    SMOOTHING,
    DraftLoss,
    acceptance_weights,
    head_labels,
    label_counts,
)
from headstart.train.losses.fused import label_probabilities
from headstart.train.losses.teacher import Teacher
from tests.support.losses import embedding_target

DSPARK = {"cross_entropy": 0.1, "total_variation": 1.8}


def test_pinned_weights() -> None:
    """Smoothed to 1/2, 1/4 and 1: the products are 1/2, 1/8 and 1/8."""
    q = torch.tensor([[4 / 9], [1 / 6], [1.0]], dtype=torch.float64)
    there = torch.ones(3, 1, dtype=torch.bool)
    assert acceptance_weights(q, there).flatten().tolist() == pytest.approx([0.75, 0.25, 0.125])
    # Without a last label its product is missing; without one between, that counts as refused.
    there[2] = False
    assert acceptance_weights(q, there).flatten().tolist() == pytest.approx([0.625, 0.125, 0.0])
    there[1:] = torch.tensor([[False], [True]])
    last = 0.5 * SMOOTHING
    weights = acceptance_weights(q, there).flatten().tolist()
    assert weights == pytest.approx([0.5 + last, last, last])


def test_they_are_the_slope_of_the_expected_number_of_drafts() -> None:
    """By log-probabilities, of the sum of the products of what was smoothed."""
    logs = (torch.rand(5, 3, dtype=torch.float64) * (1 - SMOOTHING) + SMOOTHING).log()
    logs.requires_grad_()
    logs.cumsum(0).exp().sum().backward()
    assert logs.grad is not None
    q = (logs.detach().exp() - SMOOTHING) / (1 - SMOOTHING)
    found = acceptance_weights(q, torch.ones(5, 3, dtype=torch.bool))
    torch.testing.assert_close(found, logs.grad)


class Biased(Medusa):
    """With a bias that all depths share."""

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.output_bias = nn.Parameter(torch.randn(config.vocab_size))

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        logits = super().draft_logits(depth)
        return lambda states: logits(states) + self.output_bias

    def draft_output(self, depth: int) -> DraftLogits:
        return replace(super().draft_output(depth), bias=self.output_bias)


def medusa(output: str) -> Medusa:
    made = Biased if output == "biased" else Medusa
    kept = "own" if output == "biased" else output
    config = MedusaConfig(hidden_size=6, vocab_size=11, heads=3, output=kept)  # type: ignore[arg-type]
    drafter = made(config).double()
    object.__setattr__(drafter, "_target", (embedding_target().double(),))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    return drafter


LOSSES: list[Any] = ["cross_entropy", "forward_kl", "acceptance", DSPARK]


def batch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (3, 9), generator=generator)
    features, final = torch.randn(2, 3, 9, 6, generator=generator, dtype=torch.float64)
    labels = head_labels(tokens, torch.ones_like(tokens, dtype=torch.bool), 3)
    labels[:, torch.rand(3, 9, generator=generator) < 0.3] = IGNORED
    labels[2, 0], labels[1, 1, 4] = IGNORED, IGNORED
    return tokens, features, final, labels


def by_formula(
    drafter: Any, loss: Any, weights: str, features: Tensor, labels: Tensor, final: Tensor
) -> Tensor:
    """All logits at once, and each term of the loss by its definition."""
    where = torch.ones_like(labels[0], dtype=torch.bool)
    states = drafter.draft_hidden_states(features, labels[0], where, len(labels))
    log_q = torch.stack(
        [drafter.draft_logits(k + 1)(states[k]).log_softmax(-1) for k in range(len(labels))]
    )  # [K, M, V]
    wanted = labels.flatten(1)
    there = wanted != IGNORED
    gold = log_q.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # [K, M]
    nats, kind = torch.zeros_like(gold), loss_of(loss)
    hard = 1.0 if kind.divergence is None else kind.labels
    nats = nats - hard * gold
    if kind.divergence is not None:
        for k in range(len(labels)):
            log_p = Teacher(drafter.target)(final.roll(-k - 1, 1).flatten(0, 1))
            nats[k] = nats[k] + kind.divergence(log_p, log_q[k])
    if weights == "acceptance":
        nats = nats * acceptance_weights(gold.detach().exp(), there)
    if weights == "confidence":
        for k in range(1, len(labels)):
            log_p = Teacher(drafter.target)(final.roll(-k, 1).flatten(0, 1))
            said = log_p.gather(1, wanted[k - 1].clamp(min=0).unsqueeze(1)).squeeze(1).exp()
            nats[k:] = nats[k:] * (said * there[k - 1])
    decay = 0.8 ** torch.arange(1, len(labels) + 1, dtype=nats.dtype)
    return ((nats * there).sum(1) / there.sum(1) * decay).sum()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("output", ["shared", "own", "biased"])
def test_value_and_gradient_are_the_formulas(loss: Any, weights: str, output: str) -> None:
    drafter = medusa(output)
    tokens, features, final, labels = batch()
    expected = by_formula(drafter, loss, weights, features, labels, final)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(expected, trained)
    for size in (None, 4, 1):
        run = DraftLoss(drafter, 0.8, loss, size=size, weights=weights)
        found = run(features, tokens, labels, label_counts(labels), final)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        for one, two in zip(slopes, torch.autograd.grad(found, trained), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    # The control: without the weights it is another loss.
    another = "none" if weights != "none" else "acceptance"
    other = by_formula(drafter, loss, another, features, labels, final)
    assert abs(other.item() - expected.item()) > 1e-3


def test_probabilities_of_labels() -> None:
    drafter = medusa("shared")
    _, features, _, labels = batch()
    where = torch.ones_like(labels[0], dtype=torch.bool)
    states = drafter.draft_hidden_states(features, labels[0], where, 3)
    outputs = [drafter.draft_output(k) for k in (1, 2, 3)]
    wanted = labels.flatten(1)
    found = label_probabilities(outputs, states, HardLabels(wanted, 5, fused=False))
    for k in range(3):
        q = drafter.draft_logits(k + 1)(states[k]).softmax(-1)
        for m, label in enumerate(wanted[k].tolist()):
            expected = 0.0 if label == IGNORED else q[m, label].item()
            assert found[k, m].item() == pytest.approx(expected, rel=1e-9)


def test_pinned_sum_of_losses() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): DSpark's 0.9 ‖p - q‖₁ is 0.9 / 2, beside 0.1 log 4."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    loss = loss_of(DSPARK)
    assert loss.divergence is not None and loss.labels == 0.1 and not loss.difference
    assert loss.divergence(p, q).item() == pytest.approx(0.9 / 2)
    two = loss_of({"reverse_kl": 2.0, "total_variation": 1.0})
    assert two.divergence is not None and two.labels == 0.0
    reverse = math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4
    assert two.divergence(p, q).item() == pytest.approx(2 * reverse + 1 / 4)
    assert tensors(two) == 2 * tensors(loss)
