"""Best-first trees: the nodes that the drafter finds most probable."""

from __future__ import annotations

from typing import Any

import torch

from headstart.heads import Drafter, OptionError, TokenTree

from .children import Children, Expansion
from .policy import Committed
from .search import SearchedTree, search, select


class BestFirst(SearchedTree):
    """The nodes of highest probability, as the drafter sees it.

    In each level the best `frontier` nodes are extended with their best `width` children; of all
    candidates the best `nodes` - 1 make the tree (EAGLE-2, arXiv 2406.16858). Independent heads
    answer for every node at once, so their frontier is as wide as the tree, and the tree the true
    best-first set over the product of their marginals (DDTree, arXiv 2604.12989).

    Args:
        nodes: N, the root counted.
        width: children that a node may have.
        depth: D.
        frontier: None for `width`, and for `nodes` - 1 with independent heads.

    Raises:
        OptionError: numbers that make no tree, or leave nodes without a use.
    """

    def __init__(self, nodes: int, width: int, depth: int, frontier: int | None = None):
        self.nodes, self.width, self.max_depth, self.frontier = nodes, width, depth, frontier
        if min(nodes - 1, width, depth, frontier or 1) < 1:
            raise OptionError(
                f"tree {self} has no node beside the root; expected at least 2 nodes, and width, "
                "depth and frontier from 1."
            )
        self._check_candidates(frontier or nodes - 1)

    def __str__(self) -> str:
        numbers = [self.nodes, self.width, self.max_depth, self.frontier]
        return "best-first:" + ",".join(str(number) for number in numbers if number is not None)

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        """See `Policy`; refuses more nodes than the search finds."""
        super().check(drafter, expansion)
        assert drafter is not None
        self._check_candidates(self._extended(drafter))

    def _extended(self, drafter: Drafter) -> int:
        return self.frontier or (self.nodes - 1 if drafter.independent else self.width)

    def _check_candidates(self, frontier: int) -> None:
        extended, candidates = 1, 0
        for _ in range(self.max_depth):
            candidates += extended * self.width
            extended = min(frontier, extended * self.width)
        if candidates < self.nodes - 1:
            raise OptionError(
                f"tree {self} never has more than {candidates + 1} nodes when {frontier} of a "
                "level are extended; lower its nodes, or raise width, depth or frontier."
            )

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
        assert drafter is not None
        frontier = self._extended(drafter)
        levels = search(drafter, state, committed, children, self.width, self.max_depth, frontier)
        parents, first = [torch.zeros_like(levels[0].tokens)], 1
        for level in levels[:-1]:
            parents.append((level.kept + first).repeat_interleave(self.width, dim=1))  # [B, C]
            first += level.tokens.shape[1]
        tokens = torch.cat([level.tokens for level in levels], dim=1)
        scores = torch.cat([level.scores for level in levels], dim=1)
        above, sizes = torch.cat(parents, dim=1), (self.nodes, self.max_depth, self.width)
        return select(committed.root, tokens, scores, above, *sizes)
