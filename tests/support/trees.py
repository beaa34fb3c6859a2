"""Random ragged trees over a cache, for the tests of tree attention and of its kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.core import ancestor_mask, tree_mask
from headstart.heads.core.tree_lines import pack_tree
from tests.support.tiny import random_parents

SCALING = 0.3


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison; `last` queries of `nodes` nodes, all of them when None."""

    rows: int = 2
    heads: int = 2
    groups: int = 1
    nodes: int = 7
    size: int = 16
    value: int | None = None
    slots: int = 90
    window: int | None = None
    softcap: float | None = None
    last: int | None = None


@dataclass
class Tree:
    """Queries, a cache of keys and values, and what decides what is seen."""

    query: Tensor  # [B, Hq, N, D], laid out as models hand it over
    key: Tensor  # [B, Hkv, S, D], as the slab does
    value: Tensor
    lengths: Tensor  # [B], the first as long as the slots allow, the last 0
    positions: Tensor  # [B, G]
    ancestors: Tensor  # [B, G, G]
    case: Case

    def packed(self, lengths: Tensor | None = None, ancestors: Tensor | None = None) -> Tensor:
        whole = pack_tree(
            self.lengths if lengths is None else lengths,
            self.positions,
            self.ancestors if ancestors is None else ancestors,
            self.case.window,
        )
        return whole[:, :, -self.query.shape[2] :]

    def masked(self) -> Tensor:
        """Attention as it is written everywhere: [B, N, Hq, Dv], in float64 or what is wider."""
        query, key, value = (t.double() for t in (self.query, self.key, self.value))
        key, value = (t.repeat_interleave(self.case.groups, 1) for t in (key, value))
        scores = query @ key.transpose(2, 3) * SCALING  # [B, Hq, N, S]
        if (cap := self.case.softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        mask = tree_mask(
            self.lengths,
            self.positions,
            self.ancestors,
            key.shape[2],
            torch.float64,
            self.case.window,
        )
        scores = scores + mask[:, :, -query.shape[2] :]
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def to(self, device: str) -> Tree:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make_tree(case: Case, dtype: torch.dtype, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int, size: int) -> Tensor:
        drawn = torch.randn(case.rows, tokens, heads, size, generator=generator)
        return drawn.to(dtype).transpose(1, 2)

    room = case.slots - case.nodes
    lengths = torch.randint(room + 1, (case.rows,), generator=generator)
    lengths[-1], lengths[0] = 0, room
    parents = [random_parents(case.nodes, generator) for _ in range(case.rows)]
    ancestors = ancestor_mask(torch.tensor(parents))
    return Tree(
        normal(case.last or case.nodes, case.heads * case.groups, case.size),
        normal(case.slots, case.heads, case.size),
        normal(case.slots, case.heads, case.value or case.size),
        lengths,
        lengths.unsqueeze(1) + ancestors.sum(-1) - 1,
        ancestors,
        case,
    )
