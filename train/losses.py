"""What the drafters minimise, as functions of features and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of a position that teaches nothing."""

_KEPT_LOGITS = 2**26
"""So many logits may stay in memory until the backward pass; beyond, chunks are computed twice."""


class IndependentHeads(Protocol):
    """What is asked of a drafter that is trained with `heads_loss`; Medusa has it."""

    config: Any

    @property
    def max_depth(self) -> int:
        """K, how many heads there are."""
        ...

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] target ids that the heads know, ascending; None for all."""
        ...

    def states(self, features: Tensor) -> Tensor:
        """Head states for features [..., F]: [K, ..., D]."""
        ...

    def logits(self, states: Tensor, head: int | None = None) -> Tensor:
        """One head's logits [M, Vd] for its states [M, D]."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What is trained."""
        ...


def head_labels(
    tokens: Tensor, supervised: Tensor, heads: int, vocabulary: Tensor | None = None
) -> Tensor:
    """The label of every head at every position.

    Head k (1 … K) reads the target's feature at position t, from which the target itself predicts
    token t + 1, and predicts token t + k + 1:

        tokens      x0  x1  x2  x3  x4
        features    f0  f1  f2  f3  f4
        the target  x1  x2  x3  x4
        head 1      x2  x3  x4   –   –
        head 2      x3  x4   –   –   –

    Args:
        tokens: [B, T] int64.
        supervised: [B, T] bool, the tokens that may serve as labels.
        heads: K.
        vocabulary: [Vd] the draft vocabulary, ascending; None when the heads know every token.

    Returns:
        [K, B, T] int64 ids of the draft vocabulary; `IGNORED` past the row's end, where the label
        is not supervised, and where the draft vocabulary lacks it.
    """
    known = supervised
    ids = tokens
    if vocabulary is not None:
        ids = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
        known = supervised & (vocabulary[ids] == tokens)
    labels = ids.masked_fill(~known, IGNORED)  # [B, T]
    padded = functional.pad(labels, (0, heads + 1), value=IGNORED)  # [B, T + K + 1]
    length = tokens.shape[1]
    return torch.stack([padded[:, k + 1 : k + 1 + length] for k in range(1, heads + 1)])


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each head has: [K, B, T] -> [K]."""
    return (labels != IGNORED).flatten(1).sum(1)


def heads_loss(
    drafter: IndependentHeads,
    features: Tensor,
    labels: Tensor,
    counts: Tensor,
    decay: float,
    kept: int = _KEPT_LOGITS,
) -> Tensor:
    """Cross entropy of independent heads (Medusa-1, Cai et al. 2024, arXiv 2401.10774).

    The sum over heads k = 1 … K of decay**k times the head's mean cross entropy in nats. The mean
    is over `counts`, not over this batch, so that the gradients of micro-batches, or of processes,
    add up to the gradient of the whole batch however it is split.

    Args:
        features: [B, T, F].
        labels: [K, B, T], see `head_labels`.
        counts: [K], each head's labels in the whole optimizer step, see `label_counts`.
        decay: the weight of head k is decay**k.
        kept: logits that may be held for the backward pass; where there are more, they are computed
            in chunks of at most so many, and again on the way back.

    Returns:
        The loss, float32 scalar; 0 with zero gradients when there is no label.
    """
    taught = (labels != IGNORED).any(0)  # [B, T]
    states = drafter.states(features[taught])  # [K, M, D]
    labels = labels[:, taught]  # [K, M]
    heads, positions = labels.shape
    # An empty batch must still reach every parameter, or data-parallel training waits for them.
    total = states.new_zeros((), dtype=torch.float32)
    if not positions:
        total = total + sum(parameter.float().sum() * 0.0 for parameter in drafter.parameters())
    width = drafter.config.vocab_size
    chunk = max(kept // width, 1)
    again = heads * positions * width > kept
    for head in range(heads):
        weight = decay ** (head + 1) / counts[head].clamp(min=1)
        for rows, wanted in zip(states[head].split(chunk), labels[head].split(chunk), strict=True):
            if again and torch.is_grad_enabled():
                nats = checkpoint(_nats, drafter, rows, wanted, head, use_reentrant=False)
            else:
                nats = _nats(drafter, rows, wanted, head)
            total = total + weight * nats
    return total


def _nats(drafter: IndependentHeads, states: Tensor, labels: Tensor, head: int) -> Tensor:
    """Summed cross entropy of one head: [M, D], [M] -> scalar."""
    logits = drafter.logits(states, head=head)  # [M, Vd]
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
