"""The loss of a drafter that chooses among its best tokens, against plain autograd in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import family
from headstart.heads.core import capture
from headstart.heads.dflash import DFlash
from headstart.train.losses.comparisons import IGNORED
from headstart.train.losses.draft_loss import DraftLoss, head_labels, label_counts, unbroken
from tests.support.families import target
from tests.support.tiny import VOCAB

BEST = 12


def drafter(**options: Any) -> DFlash:
    torch.manual_seed(4)
    config: Any = family("dflash").config_class
    small = {"layers": 1, "depths": 4, "selector_rank": 6, "selector_top_k": BEST, **options}
    made: Any = family("dflash")(config.for_target(target("tiny"), **small))
    made = made.double().bind(target("tiny"))
    made.init_from_target(torch.arange(VOCAB))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.train()


def batch(made: DFlash) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, supervised = torch.randint(VOCAB, (3, 14)), torch.rand(3, 14) < 0.9
    features = capture(target("tiny"), list(made.config.feature_layers), tokens).detach()
    labels = head_labels(tokens, supervised, made.train_depths, made.draft_vocabulary)
    return features, tokens, unbroken(labels, supervised), supervised


def by_autograd(made: DFlash, features: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    """The logits' own loss, and that of the choice where the label is among the best."""
    everywhere, size = torch.ones_like(tokens, dtype=torch.bool), made.config.hidden_size
    states, total = made.draft_hidden_states(features, tokens, everywhere, len(labels)), 0.0
    chosen = 0
    for k, wanted in enumerate(labels.flatten(1)):
        there = wanted != IGNORED
        own, wanted = states[k][there], wanted[there]
        alone, every = made._output(own[:, :size]), made.draft_logits(k + 1)(own)
        nats = F.cross_entropy(alone, wanted, reduction="sum")
        for row, label in enumerate(wanted.tolist()):
            best = alone[row].topk(BEST).indices.tolist()
            if label in best:
                chosen += 1
                nats = nats + F.cross_entropy(
                    every[row, best], torch.tensor(best.index(label)), reduction="sum"
                )
        total = total + 0.8 ** (k + 1) * nats / len(wanted)
    assert 0 < chosen < int((labels != IGNORED).sum()), "some labels are not among the best"
    return torch.as_tensor(total)


@pytest.mark.parametrize("options", [{}, {"output": "trimmed", "draft_vocab_size": 40}])
def test_it_is_that_of_the_candidates_and_of_the_choice(options: dict[str, Any]) -> None:
    made = drafter(**options)
    features, tokens, labels, _ = batch(made)
    trained = [p for p in made.parameters() if p.requires_grad]
    expected = by_autograd(made, features, tokens, labels)
    slopes = torch.autograd.grad(expected, trained)
    found = DraftLoss(made, 0.8, size=5)(features, tokens, labels, label_counts(labels))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, two in zip(slopes, torch.autograd.grad(found, trained), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_one_that_chooses_among_all_has_the_loss_of_all_its_logits() -> None:
    made = drafter(selector_top_k=0)
    features, tokens, labels, _ = batch(made)
    states = made.draft_hidden_states(features, tokens, torch.ones_like(tokens) > 0, len(labels))
    expected = sum(
        0.8 ** (k + 1) * F.cross_entropy(made.draft_logits(k + 1)(states[k]), wanted)
        for k, wanted in enumerate(labels.flatten(1))
    )
    found = DraftLoss(made, 0.8)(features, tokens, labels, label_counts(labels))
    assert found.item() == pytest.approx(torch.as_tensor(expected).item(), rel=1e-12)


def test_micro_batches_add_up() -> None:
    made = drafter()
    features, tokens, labels, _ = batch(made)
    counts, run = label_counts(labels), DraftLoss(made, 0.8)
    whole = run(features, tokens, labels, counts)
    parts = [
        run(features[i : i + 1], tokens[i : i + 1], labels[:, i : i + 1], counts) for i in (0, 1, 2)
    ]
    assert float(sum(parts)) == pytest.approx(whole.item(), rel=1e-12)
