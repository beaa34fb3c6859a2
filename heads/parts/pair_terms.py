"""What the tokens before a draft add to the draft's logits: W2 of r numbers.

DSpark       W1[x]                          a row e of a table for the token x before
  gated      σ(G [h ; e]) ⊙ e               where the draft's own state h says how much of it
  rnn        tanh(o)                        o of a cell that reads e and h, see `MarkovTerm`
DFlash2      P[x] ⊙ H h                     times a projection of h
Domino       SiLU(A [h ; s])                s of a GRU over the embeddings of the block's tokens

The cells depend on all drafts before: each node keeps a state for those after it.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

MarkovKind = Literal["vanilla", "gated", "rnn"]

Numbers = tuple[Tensor, Tensor | None]
"""The r numbers of drafts, [..., r], and the states that are kept for those after them."""


class MarkovTerm(nn.Module):
    """DSpark's (arXiv 2607.05147), of three kinds. That with a cell is, with its state c:

    u, v, o = J [c ; e ; h],    c' = σ(u) ⊙ c + (1 - σ(u)) ⊙ tanh(v)
    """

    reads_embeddings = False

    def __init__(self, read: int, proposed: int, size: int, rank: int, kind: MarkovKind):
        super().__init__()
        self.has_states = kind == "rnn"
        self._kind = kind
        self.markov_w1 = nn.Embedding(read, rank)
        self.markov_w2 = nn.Linear(rank, proposed, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, kept: Tensor | None = None) -> Numbers:
        """Tokens [...], hidden states [..., D] that are broadcast, and the states kept [..., r]."""
        row = self.markov_w1(before)  # [..., r]
        if self._kind == "vanilla":
            return row, None
        hidden = hidden.expand(*row.shape[:-1], -1)
        if self._kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, row], -1))) * row, None
        kept = torch.zeros_like(row) if kept is None else kept
        gate, new, out = self.joint_proj(torch.cat([kept, row, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * kept + (1 - gate) * torch.tanh(new)

    @property
    def last(self) -> nn.Linear:
        """W2, [Vd, r]."""
        return self.markov_w2

    def start(self) -> None:
        """Random rows for the tokens; nothing is added yet."""
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)
        for name in ("gate_proj", "joint_proj"):
            if (layer := getattr(self, name, None)) is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)


class SelectorTerm(nn.Module):
    """DFlash2's (github.com/z-lab/dflash)."""

    reads_embeddings = has_states = False

    def __init__(self, read: int, proposed: int, size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Embedding(read, rank)
        self.successor_codebook = nn.Linear(rank, proposed, bias=False)
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, before: Tensor, hidden: Tensor, kept: Tensor | None = None) -> Numbers:
        """Tokens [...] and hidden states [..., D] that are broadcast."""
        return self.predecessor_codebook(before) * self.hidden_projection(hidden), None

    @property
    def last(self) -> nn.Linear:
        """W2, [Vd, r]."""
        return self.successor_codebook

    def start(self) -> None:
        """Random rows and a random projection; nothing is added yet."""
        nn.init.normal_(self.predecessor_codebook.weight)
        nn.init.normal_(self.hidden_projection.weight, std=self.hidden_projection.in_features**-0.5)
        nn.init.zeros_(self.successor_codebook.weight)


class DominoTerm(nn.Module):
    """Domino's (arXiv 2605.29707); the GRU has no biases, and begins at the block's first token."""

    reads_embeddings = has_states = True

    def __init__(self, proposed: int, size: int, rank: int, wide: int):
        super().__init__()
        self.gru_input = nn.Linear(size, 3 * wide, bias=False)
        self.gru_state = nn.Linear(wide, 3 * wide, bias=False)
        self.inner = nn.Linear(size + wide, rank, bias=False)
        self.outer = nn.Linear(rank, proposed, bias=False)

    def forward(self, before: Tensor, hidden: Tensor, kept: Tensor | None = None) -> Numbers:
        """Embeddings [..., D] of the tokens before, hidden states [..., D] that are broadcast, and
        the GRU's states before these tokens [..., S]."""
        read = self.gru_input(before)  # [..., 3 S]
        kept = torch.zeros_like(read.chunk(3, -1)[0]) if kept is None else kept
        reset, update, new = read.chunk(3, -1)
        of_reset, of_update, of_new = self.gru_state(kept).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        update = torch.sigmoid(update + of_update)
        state = (1 - update) * new + update * kept  # [..., S]
        hidden = hidden.expand(*state.shape[:-1], -1)
        return silu(self.inner(torch.cat([hidden, state], -1))), state

    @property
    def last(self) -> nn.Linear:
        """W2, [Vd, r]."""
        return self.outer

    def start(self) -> None:
        """Random weights; nothing is added yet."""
        for layer in (self.gru_input, self.gru_state, self.inner):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(self.outer.weight)


PairTerm = Any
"""A `MarkovTerm`, a `SelectorTerm` or a `DominoTerm`."""


def in_a_row(term: PairTerm, before: Tensor, hidden: Tensor) -> Tensor:
    """The numbers [K, M, r] of K drafts, of which each is the token before the next one.

    Args:
        before: tokens [K, M], or embeddings [K, M, D] for a term that reads those.
        hidden: [K, M, D].
    """
    if not term.has_states:
        return term(before, hidden)[0]
    found, kept = [], None
    for each, own in zip(before, hidden, strict=True):
        numbers, kept = term(each, own, kept)
        found.append(numbers)
    return torch.stack(found)
