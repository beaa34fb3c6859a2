"""Beam trees: what a beam search of the drafter ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import Drafter, OptionError, TokenTree

from .children import Children
from .policy import Committed
from .search import NEVER, SearchedTree, SearchLevel, search, select


class Beam(SearchedTree):
    """The union of the paths that a beam search ends with (ReDrafter, arXiv 2403.09919).

    Each level keeps the best `width` pairs of a beam and a token. Beams with a common beginning
    share its nodes; nodes on no final beam are dropped. Where the search runs dry before `length`,
    the final beams are the last that there were.

    Args:
        width: beams; length: D, tokens of each.
        nodes: N, the root counted; the worst beams are cut first. None for 1 + width * length.

    Raises:
        OptionError: numbers that make no tree, or leave nodes without a use.
    """

    def __init__(self, width: int, length: int, nodes: int | None = None):
        self.width, self.max_depth, self._cut = width, length, nodes
        most = 1 + width * length
        self.nodes = most if nodes is None else nodes
        if min(width, length) < 1 or not 1 < self.nodes <= most:
            raise OptionError(
                f"tree {self} makes no beams; expected width and length from 1, and from 2 to "
                "1 + width * length nodes."
            )

    def __str__(self) -> str:
        cut = "" if self._cut is None else f",{self._cut}"
        return f"beam:{self.width},{self.max_depth}{cut}"

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
        assert drafter is not None
        width, depth = self.width, self.max_depth
        levels = search(drafter, state, committed, children, width, depth, width)
        tokens = torch.cat([level.tokens.gather(1, level.kept) for level in levels], dim=1)
        slots = torch.arange(depth - 1, device=tokens.device).repeat_interleave(width) * width + 1
        parents = torch.cat([level.kept // width for level in levels], dim=1)  # [B, D * width]
        parents = parents + pad(slots, (width, 0))
        goals = torch.cat(final_beams(levels, width), dim=1)
        return select(committed.root, tokens, goals, parents, self.nodes, depth, width)


def final_beams(levels: Sequence[SearchLevel], width: int) -> list[Tensor]:
    """For each level minus the place of the best final beam through each beam, [B, width].

    -inf where no final beam passes.
    """
    goals: list[Tensor] = []
    for level in reversed(levels):
        alive = level.scores.gather(1, level.kept) > NEVER  # [B, width]
        order = -torch.arange(width, dtype=torch.float64, device=alive.device)
        ends = torch.where(alive, order, NEVER)
        if goals:
            below, parent = goals[-1], levels[len(levels) - len(goals)].kept // width
            passing = torch.full_like(below, NEVER).scatter_reduce(1, parent, below, "amax")
            dry = (below == NEVER).all(1, keepdim=True)
            ends = torch.where(dry, ends, passing)
        goals.append(ends)
    return goals[::-1]
