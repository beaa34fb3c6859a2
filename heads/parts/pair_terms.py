"""What the token before a draft adds to the draft's logits: W2 of r numbers.

DSpark       W1[x]                          a row of a table for the token x before
DFlash2      P[x] ⊙ H h                     times a projection of the draft's own state h
"""

from typing import Any

from torch import Tensor, nn


class MarkovTerm(nn.Module):
    """DSpark's (arXiv 2607.05147)."""

    def __init__(self, read: int, proposed: int, size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(read, rank)
        self.markov_w2 = nn.Linear(rank, proposed, bias=False)

    def forward(self, before: Tensor, states: Tensor) -> Tensor:
        """Tokens [...] and states [..., D] that are broadcast: [..., r]."""
        return self.markov_w1(before)

    @property
    def last(self) -> nn.Linear:
        """W2, [Vd, r]."""
        return self.markov_w2

    def start(self) -> None:
        """Random rows for the tokens; nothing is added yet."""
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)


class SelectorTerm(nn.Module):
    """DFlash2's (github.com/z-lab/dflash)."""

    def __init__(self, read: int, proposed: int, size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Embedding(read, rank)
        self.successor_codebook = nn.Linear(rank, proposed, bias=False)
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, before: Tensor, states: Tensor) -> Tensor:
        """Tokens [...] and states [..., D] that are broadcast: [..., r]."""
        return self.predecessor_codebook(before) * self.hidden_projection(states)

    @property
    def last(self) -> nn.Linear:
        """W2, [Vd, r]."""
        return self.successor_codebook

    def start(self) -> None:
        """Random rows and a random projection; nothing is added yet."""
        nn.init.normal_(self.predecessor_codebook.weight)
        nn.init.normal_(self.hidden_projection.weight, std=self.hidden_projection.in_features**-0.5)
        nn.init.zeros_(self.successor_codebook.weight)


PairTerm = Any  # a `MarkovTerm` or a `SelectorTerm`
