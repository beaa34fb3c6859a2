"""The heads' labels and their loss, with numbers that can be worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.losses import IGNORED, head_labels, heads_loss, label_counts

LN2 = math.log(2)


class Fixed(nn.Module):
    """Two heads whose logits are the features, times a weight that is 1."""

    def __init__(self, heads: int = 2, width: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.max_depth, self.draft_vocabulary = heads, None
        self.config = SimpleNamespace(vocab_size=width)

    def states(self, features: Tensor) -> Tensor:
        return (features * self.scale).expand(self.max_depth, *features.shape)

    def logits(self, states: Tensor, head: int | None = None) -> Tensor:
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


@pytest.mark.parametrize("kept", [2**20, 3, 1])
def test_pinned_numbers(kept: int) -> None:
    # Four tokens: head 1 has labels at positions 0 and 1, head 2 at position 0.
    tokens = torch.tensor([[0, 0, 0, 1]])
    labels = head_labels(tokens, every(tokens), 2)
    counts = label_counts(labels)
    assert counts.tolist() == [2, 1]
    flat = torch.zeros(1, 4, 2)
    assert heads_loss(Fixed(), flat, labels, counts, 0.8, kept).item() == pytest.approx(
        0.8 * LN2 + 0.64 * LN2
    )
    # Token 0 has probability 3/4. Head 1 wants 0 and 1, head 2 wants 1.
    leaning = torch.tensor([math.log(3.0), 0.0]).expand(1, 4, 2)
    wrong, right = math.log(4), math.log(4 / 3)
    assert heads_loss(Fixed(), leaning, labels, counts, 0.5, kept).item() == pytest.approx(
        0.5 * (right + wrong) / 2 + 0.25 * wrong
    )


def test_without_a_label_the_loss_is_zero_and_reaches_every_parameter() -> None:
    drafter = Fixed()
    labels = torch.full((2, 1, 4), IGNORED)
    loss = heads_loss(drafter, torch.randn(1, 4, 2), labels, label_counts(labels), 0.8)
    loss.backward()
    assert loss.item() == 0.0 and drafter.scale.grad is not None
    assert drafter.scale.grad.item() == 0.0


def medusa(output: str) -> Medusa:
    options: dict[str, Any] = {"output": output, "draft_vocab_size": 8 * (output == "trimmed")}
    config = MedusaConfig(hidden_size=6, vocab_size=11, heads=3, **options)
    drafter = Medusa(config)
    layer = nn.Linear(6, 11, bias=False).requires_grad_(False)
    target = SimpleNamespace(get_output_embeddings=lambda: layer)
    object.__setattr__(drafter, "_target", (target,))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    return drafter


def gradients(drafter: Medusa, parts: list[slice], kept: int = 2**20) -> tuple[float, list[Tensor]]:
    """The loss of a batch of four rows, computed in parts, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (4, 9), generator=generator)
    features = torch.randn(4, 9, 6, generator=generator)
    supervised = torch.rand(4, 9, generator=generator) < 0.6
    supervised[3] = False  # a micro-batch without any label
    labels = head_labels(tokens, supervised, 3, drafter.draft_vocabulary)
    counts = label_counts(labels)
    drafter.zero_grad()
    total = 0.0
    for part in parts:
        loss = heads_loss(drafter, features[part], labels[:, part], counts, 0.8, kept)
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


@pytest.mark.parametrize("output", ["shared", "own", "trimmed"])
def test_splits_and_chunks_change_nothing(output: str) -> None:
    drafter = medusa(output)
    whole = gradients(drafter, [slice(0, 4)])
    assert whole[0] > 0 and len(whole[1]) == len(list(drafter.parameters()))
    for parts, kept in (
        ([slice(0, 1), slice(1, 4)], 2**20),
        ([slice(i, i + 1) for i in range(4)], 2**20),
        ([slice(0, 4)], 40),
        ([slice(0, 4)], 1),
    ):
        split = gradients(drafter, parts, kept)
        assert split[0] == pytest.approx(whole[0], rel=1e-5)
        for a, b in zip(whole[1], split[1], strict=True):
            torch.testing.assert_close(a, b)
