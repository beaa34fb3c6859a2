"""Which token each depth is trained to predict at each position."""

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The label of a position that is left out of the loss."""


def head_labels(
    tokens: Tensor, supervised: Tensor, depths: int, vocabulary: Tensor | None = None
) -> Tensor:
    """The label of every depth at every position.

    Depth k (1 … K) starts from the target's feature at position t, from which the target itself
    predicts token t + 1, and predicts token t + k + 1:

        tokens      x0  x1  x2  x3  x4
        features    f0  f1  f2  f3  f4
        the target  x1  x2  x3  x4
        depth 1     x2  x3  x4   –   –
        depth 2     x3  x4   –   –   –

    Args:
        tokens: [B, T] int64.
        supervised: [B, T] bool, the tokens that may be labels.
        depths: K.
        vocabulary: [Vd] the draft vocabulary, ascending; None for the target's.

    Returns:
        [K, B, T] int64 ids of the draft vocabulary; `IGNORED` where the label is past the row's
        end, not supervised, or not in the draft vocabulary.
    """
    known = supervised
    ids = tokens
    if vocabulary is not None:
        ids = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
        known = supervised & (vocabulary[ids] == tokens)
    labels = ids.masked_fill(~known, IGNORED)  # [B, T]
    padded = functional.pad(labels, (0, depths + 1), value=IGNORED)  # [B, T + K + 1]
    length = tokens.shape[1]
    return torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, depths + 1)])


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each depth has: [K, B, T] -> [K]."""
    return (labels != IGNORED).flatten(1).sum(1)


def target_positions(supervised: Tensor) -> Tensor:
    """The positions at which the target's own next token is supervised: [B, T] -> [B, T] bool."""
    return functional.pad(supervised[:, 1:], (0, 1), value=False)
