"""Labels of every depth."""

import torch
from torch import Tensor

from headstart.train.losses.labels import IGNORED, head_labels, label_counts


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
