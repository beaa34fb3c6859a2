"""Labels and loss of a drafter, with numbers worked out by hand, and by the definition."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads import TrainableDrafter
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.train.losses import LOSSES
from headstart.train.losses.comparisons import IGNORED
from headstart.train.losses.draft_loss import DraftLoss, head_labels, label_counts
from tests.support.losses import embedding_target

LN2 = math.log(2)


class Fixed(nn.Module):
    """Two depths whose logits are the features, times a weight that is 1."""

    def __init__(self, depths: int = 2, width: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.train_depths, self.draft_vocabulary, self.depth_shares = depths, None, None
        self.config = SimpleNamespace(vocab_size=width, hidden_size=width)

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        return (features[where] * self.scale).expand(depths, -1, -1)

    def draft_logits(self, depth: int) -> Any:
        return lambda states: states

    draft_output = TrainableDrafter.draft_output
    draft_choice = TrainableDrafter.draft_choice

    def predicted_features(self, states: Tensor) -> Tensor:
        return states


def every(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def test_head_k_predicts_the_token_k_plus_one_ahead() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    none = IGNORED
    assert head_labels(tokens, every(tokens), 3).tolist() == [
        [[12, 13, 14, none, none]],
        [[13, 14, none, none, none]],
        [[14, none, none, none, none]],
    ]


def test_only_supervised_tokens_are_labels() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    supervised = torch.tensor([[False, False, False, True, False]])
    labels = head_labels(tokens, supervised, 2)
    assert labels[0, 0].tolist() == [IGNORED, 13, IGNORED, IGNORED, IGNORED]
    assert labels[1, 0].tolist() == [13, IGNORED, IGNORED, IGNORED, IGNORED]
    assert label_counts(labels).tolist() == [1, 1]


def test_a_trimmed_vocabulary_drops_what_it_lacks() -> None:
    tokens = torch.tensor([[0, 0, 9, 3, 7, 20]])
    labels = head_labels(tokens, every(tokens), 1, vocabulary=torch.tensor([3, 9]))
    assert labels[0, 0].tolist() == [1, 0, IGNORED, IGNORED, IGNORED, IGNORED]


def test_a_row_shorter_than_the_heads_reach_has_no_label() -> None:
    tokens = torch.tensor([[5, 6]])
    assert head_labels(tokens, every(tokens), 4).eq(IGNORED).all()


def loss_of(
    drafter: Any, features: Tensor, labels: Tensor, decay: float, final: Any = None, **more: Any
) -> Tensor:
    tokens, counts = torch.zeros_like(labels[0]), label_counts(labels)
    return DraftLoss(drafter, decay, **more)(features, tokens, labels, counts, final)


@pytest.mark.parametrize("size", [100, 1])
def test_pinned_numbers(size: int) -> None:
    # Four tokens: depth 1 has labels at positions 0 and 1, depth 2 at position 0.
    tokens = torch.tensor([[0, 0, 0, 1]])
    labels = head_labels(tokens, every(tokens), 2)
    assert label_counts(labels).tolist() == [2, 1]
    flat = torch.zeros(1, 4, 2)
    assert loss_of(Fixed(), flat, labels, 0.8, size=size).item() == pytest.approx(
        0.8 * LN2 + 0.64 * LN2
    )
    # Token 0 has probability 3/4. Depth 1 wants 0 and 1, depth 2 wants 1.
    leaning = torch.tensor([math.log(3.0), 0.0]).expand(1, 4, 2)
    wrong, right = math.log(4), math.log(4 / 3)
    assert loss_of(Fixed(), leaning, labels, 0.5, size=size).item() == pytest.approx(
        0.5 * (right + wrong) / 2 + 0.25 * wrong
    )


@pytest.mark.parametrize("size", [100, 1])
def test_pinned_distances_of_features(size: int) -> None:
    """Depth k at position t predicts the feature at t + k; what has no label is left out."""
    tokens = torch.tensor([[0, 0, 0, 1]])
    labels = head_labels(tokens, every(tokens), 2)
    final = torch.tensor([[[7.0, 7.0], [1.0, 0.0], [2.0, 0.0], [9.0, 9.0]]])
    flat = torch.zeros(1, 4, 2)  # the logits, and the predicted features
    # Smooth L1 of 0 and 1 is 1/2, of 0 and 2 it is 3/2; the mean is over two entries.
    first, second = (0.25 + 0.75) / 2, 0.75
    given: dict[str, Any] = {"final": final, "size": size, "feature_weight": 10.0}
    assert loss_of(Fixed(), flat, labels, 0.5, **given).item() == pytest.approx(
        0.5 * (LN2 + 10 * first) + 0.25 * (LN2 + 10 * second)
    )


def test_without_a_label_the_loss_is_zero_and_reaches_every_parameter() -> None:
    drafter = Fixed()
    labels = torch.full((2, 1, 4), IGNORED)
    loss = loss_of(drafter, torch.randn(1, 4, 2), labels, 0.8)
    loss.backward()
    assert loss.item() == 0.0 and drafter.scale.grad is not None
    assert drafter.scale.grad.item() == 0.0


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"output": "shared"},
    "own": {"output": "own"},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 8},
}


def made(family: str, output: str) -> TrainableDrafter:
    shape = {"hidden_size": 6, "vocab_size": 11, **OPTIONS[output]}
    drafter: TrainableDrafter = (
        Medusa(MedusaConfig(heads=3, **shape))
        if family == "medusa"
        else ReDrafter(ReDrafterConfig(depths=3, **shape))
    )
    object.__setattr__(drafter, "_target", (embedding_target(),))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
        if output == "trimmed":
            drafter.vocabulary.copy_(torch.tensor([0, 1, 3, 4, 6, 7, 8, 10]))  # type: ignore[operator]
    return drafter


FAMILIES = [
    *(("medusa", output) for output in OPTIONS),
    *(("redrafter", output) for output in ("own", "trimmed")),
]


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [4, 9], features, final features and what is supervised; the last row is not."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (4, 9), generator=generator)
    features = torch.randn(4, 9, 6, generator=generator)
    final = torch.randn(4, 9, 6, generator=generator)
    supervised = torch.rand(4, 9, generator=generator) < 0.6
    supervised[3] = False
    return tokens, features, final, supervised


def gradients(
    drafter: TrainableDrafter, name: str, parts: list[slice], size: int | None = None
) -> tuple[float, list[Tensor]]:
    """The loss of a batch of four rows, computed in parts, and its gradients."""
    tokens, features, final, supervised = batch()
    labels = head_labels(tokens, supervised, 3, drafter.draft_vocabulary)
    counts = label_counts(labels)
    draft_loss = DraftLoss(drafter, 0.8, name, size=size)
    drafter.zero_grad()
    total = 0.0
    for part in parts:
        loss = draft_loss(features[part], tokens[part], labels[:, part], counts, final[part])
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def by_formula(drafter: TrainableDrafter, name: str) -> tuple[float, list[Tensor]]:
    """The same from the definition: every logit at once, one position after another."""
    tokens, features, final, supervised = batch()
    vocabulary = drafter.draft_vocabulary
    known = torch.arange(11) if vocabulary is None else vocabulary
    states = drafter.draft_hidden_states(
        features, tokens, torch.ones_like(supervised), 3
    ).unflatten(1, (4, 9))
    divergence, total = LOSSES[name].divergence, torch.zeros(())
    drafter.zero_grad()
    for depth in (1, 2, 3):
        losses = []
        for row in range(4):
            for at in range(9 - depth - 1):
                word = tokens[row, at + depth + 1]
                if not supervised[row, at + depth + 1] or word not in known:
                    continue
                log_q = drafter.draft_logits(depth)(states[depth - 1, row, at]).log_softmax(-1)
                if divergence is None:
                    losses.append(-log_q[known.tolist().index(int(word))])
                    continue
                said = drafter.target.get_output_embeddings()(final[row, at + depth])  # type: ignore[misc]
                p = said.softmax(-1)[known]
                losses.append(divergence((p / p.sum()).log()[None], log_q[None])[0])
        total = total + 0.8**depth * torch.stack(losses).mean()
    total.backward()
    return total.item(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


@pytest.mark.parametrize(("family", "output"), FAMILIES)
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_and_splits_give_the_formulas_gradient(family: str, output: str, name: str) -> None:
    drafter = made(family, output)
    expected = by_formula(drafter, name)
    assert expected[0] > 0 and len(expected[1]) == len(list(drafter.parameters()))
    for parts, size in (
        ([slice(0, 4)], None),
        ([slice(0, 1), slice(1, 4)], None),
        ([slice(i, i + 1) for i in range(4)], 2),
        ([slice(0, 4)], 4),
        ([slice(0, 4)], 1),
    ):
        found = gradients(drafter, name, parts, size)
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for a, b in zip(expected[1], found[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_teacher_is_asked_about_the_position_of_the_depth() -> None:
    """A drafter that says what the target says at t + k has nothing to learn; elsewhere it has."""
    model, size = embedding_target(), 6

    class Echo(nn.Module):
        train_depths, draft_vocabulary, depth_shares = 2, None, None
        config, target = SimpleNamespace(vocab_size=11), model
        late = 0

        def draft_hidden_states(
            self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
        ) -> Tensor:
            steps = (self.late + k for k in range(1, depths + 1))
            return torch.stack([features.roll(-step, 1)[where] for step in steps])

        def draft_logits(self, depth: int) -> Any:
            return model.layer

        draft_output = TrainableDrafter.draft_output
        draft_choice = TrainableDrafter.draft_choice

    tokens = torch.randint(11, (2, 8))
    final = torch.randn(2, 8, size)
    labels = head_labels(tokens, every(tokens), 2)
    drafter, options = Echo(), {"loss": "forward_kl", "final": final}
    assert loss_of(drafter, final, labels, 1.0, **options).item() == pytest.approx(0, abs=1e-6)
    drafter.late = 1
    assert loss_of(drafter, final, labels, 1.0, **options).item() > 0.1
