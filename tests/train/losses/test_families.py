"""Every family's loss has the value and the gradient that plain autograd gives it, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import FAMILIES, FINAL, TrainableDrafter, family
from headstart.heads.core import capture
from headstart.train.losses import LOSSES, comparisons
from headstart.train.losses.comparisons import IGNORED
from headstart.train.losses.draft_loss import (
    DraftLoss,
    acceptance_weights,
    head_labels,
    label_counts,
)
from headstart.train.losses.teacher import Teacher
from tests.support.families import drafter as shared_drafter
from tests.support.families import moved, target
from tests.support.tiny import VOCAB

TRAINED = [name for name in FAMILIES if family(name).trainable]
OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TRAINED),
    ("medusa", {"output": "shared"}),
    ("hydra", {"output": "own"}),
    *((name, {"output": "trimmed", "draft_vocab_size": 40}) for name in ("medusa", "eagle3")),
]
WEIGHTED = "cross entropy, weighted by acceptance"


def drafter(name: str, options: dict[str, Any]) -> TrainableDrafter:
    if not options:
        return shared_drafter(name, "tiny").train()
    made = moved(name, "tiny", **options)
    assert isinstance(made, TrainableDrafter)
    return made


def batch(known: Tensor | None) -> tuple[Tensor, Tensor]:
    """tokens [3, 14] of which most are supervised."""
    tokens = torch.randint(VOCAB, (3, 14))
    supervised = torch.rand(3, 14) < 0.8
    supervised[1, :6] = False
    if known is not None:  # now and then one that the drafter lacks
        supervised |= torch.rand(3, 14) < 0.5
    return tokens, supervised


def by_autograd(
    made: TrainableDrafter,
    name: str,
    features: Tensor,
    tokens: Tensor,
    labels: Tensor,
    final: Any,
    weighted: bool = False,
) -> Tensor:
    """All logits at once, from `draft_logits`, as decoding asks for them."""
    where, total = torch.ones_like(tokens, dtype=torch.bool), 0.0
    states = made.draft_hidden_states(features, tokens, where, len(labels))
    divergence, there = LOSSES[name].divergence, (labels != IGNORED).flatten(1)
    every = [made.draft_logits(k + 1)(states[k]).log_softmax(-1) for k in range(len(labels))]
    said = labels.flatten(1).clamp(min=0).unsqueeze(-1)  # [K, M, 1]
    gold = torch.stack([log_q.gather(1, said[k])[:, 0] for k, log_q in enumerate(every)])
    weights = acceptance_weights(gold.detach().exp(), there) * there
    for k, (log_q, wanted) in enumerate(zip(every, labels, strict=True), start=1):
        counts, wanted = wanted.flatten() != IGNORED, wanted.flatten()
        if divergence is None:
            nats = F.nll_loss(log_q, wanted, ignore_index=IGNORED, reduction="sum")
        else:
            log_p = Teacher(made.target, made.draft_vocabulary)(final.roll(-k, 1).flatten(0, 1))
            nats = divergence(log_p, log_q)[counts].sum()
        if weighted:
            nats = -(gold[k - 1] * weights[k - 1]).sum()
        total = total + 0.8**k * nats / counts.sum().clamp(min=1)
    return torch.as_tensor(total)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl", "acceptance", WEIGHTED])
@pytest.mark.parametrize(("name", "options"), OUTPUTS, ids=lambda v: str(v) if v else "")
def test_gradients_are_those_of_autograd(
    name: str, options: dict[str, Any], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafter(name, options)
    tokens, supervised = batch(made.draft_vocabulary)
    features = capture(target("tiny"), list(made.config.feature_layers), tokens).detach()
    final = capture(target("tiny"), [FINAL], tokens).detach()
    labels = head_labels(tokens, supervised, made.train_depths, made.draft_vocabulary)
    trained = [p for p in made.parameters() if p.requires_grad]
    weighted = loss == WEIGHTED
    loss = "cross_entropy" if weighted else loss
    expected = by_autograd(made, loss, features, tokens, labels, final, weighted)
    slopes = torch.autograd.grad(expected, trained, allow_unused=True)
    for size, cached in ((None, comparisons._CACHED), (5, 2 * VOCAB + 1)):
        monkeypatch.setattr(comparisons, "_CACHED", cached)
        run = DraftLoss(made, 0.8, loss, size=size, weights="acceptance" if weighted else "none")
        found = run(features, tokens, labels, label_counts(labels), final)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        mine = torch.autograd.grad(found, trained, allow_unused=True)
        for one, two in zip(slopes, mine, strict=True):
            one, two = (0.0 * trained[0].sum() if s is None else s for s in (one, two))
            assert (one - two).norm() <= 1e-12 * max(one.norm(), 1e-3)


@pytest.mark.parametrize("output", ["own", "shared"])
def test_a_depth_without_labels_has_no_gradient(output: str) -> None:
    """Memory that is not written to holds NaN here."""
    made = drafter("medusa", {"heads": 4, "output": output})
    tokens, supervised = batch(None)
    final = torch.randn(3, 14, 32, dtype=torch.double)
    labels = head_labels(tokens, supervised, 4)
    labels[2:] = IGNORED
    expected = by_autograd(made, "forward_kl", final, tokens, labels, final)
    torch.use_deterministic_algorithms(True)
    try:
        loss = DraftLoss(made, 0.8, "forward_kl", size=6)
        found = loss(final, tokens, labels, label_counts(labels), final)
        slopes = (torch.autograd.grad(x, list(made.parameters())) for x in (expected, found))
        for one, two in zip(*slopes, strict=True):
            torch.testing.assert_close(one, two)
            assert one.abs().sum() > 0 and two.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy", "forward_kl"])
def test_in_float32_they_differ_by_rounding(loss: str) -> None:
    made = copy.deepcopy(drafter("medusa", {"heads": 7})).float()
    made.bind(copy.deepcopy(target("tiny")).float())
    tokens, supervised = batch(None)
    final, labels = torch.randn(3, 14, 32), head_labels(tokens, supervised, 7)
    expected = by_autograd(made, loss, final, tokens, labels, final)
    found = DraftLoss(made, 0.8, loss, size=9)(final, tokens, labels, label_counts(labels), final)
    slopes = (torch.autograd.grad(x, list(made.parameters())) for x in (expected, found))
    for one, two in zip(*slopes, strict=True):
        assert (one - two).norm() <= 5e-7 * one.norm()


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cross_entropy"])
@pytest.mark.parametrize("size", [None, 6])
def test_a_row_of_the_teacher_is_computed_once(
    loss: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For seven depths together; forward and backward."""
    made = drafter("medusa", {"heads": 7})
    tokens, supervised = batch(None)
    rows = []
    asked = Teacher.logits

    def counted(self: Teacher, layer: Any, features: Tensor, *room: Any) -> Tensor:
        rows.append(len(features))
        return asked(self, layer, features, *room)

    monkeypatch.setattr(Teacher, "logits", counted)
    labels = head_labels(tokens, supervised, 7)
    final = torch.randn(3, 14, 32, dtype=torch.double)
    run = DraftLoss(made, 0.8, loss, size=size)
    run(final, tokens, labels, label_counts(labels), final).backward()
    positions = int((labels != IGNORED).any(0).sum())
    taught = supervised[:, 2:].sum()  # what a token before it predicts two ahead
    assert sum(rows) == taught and sum(rows) <= 1.05 * positions
    assert len(rows) == (1 if size is None else -(-sum(rows) // size))


def test_a_second_backward_pass_is_refused() -> None:
    made = drafter("medusa", {})
    tokens, supervised = batch(None)
    labels = head_labels(tokens, supervised, made.train_depths)
    features = torch.randn(3, 14, 32, dtype=torch.double)
    loss = DraftLoss(made, 0.8)(features, tokens, labels, label_counts(labels))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="found only once"):
        loss.backward()
