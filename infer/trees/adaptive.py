"""Trees whose depth follows the text: deep where drafts are accepted, none where they are not."""

from __future__ import annotations

from typing import Any, Self

from headstart.heads import Drafter, TokenTree

from .children import Children
from .expansions import Expansion
from .policy import Committed, Policy
from .shapes import AdaptiveShape
from .static import StaticTree


class AdaptiveTree(AdaptiveShape, Policy):
    """A tree that is cut to one of a few depths in every round, see `infer.depth.DepthChoice`.

    The depth depends on what is accepted and on how long rounds take, so it differs from one run to
    the next. Exact arithmetic leaves the text as it is; near-ties may fall otherwise.

    Attributes:
        levels: the trees that rounds grow, by depth: plain decoding, then those of an eighth, a
            quarter, half and all of the tree's levels, as far as these differ.

    >>> [str(level) for level in AdaptiveTree(StaticTree.chain(7)).levels]
    ['plain', 'chain:1', 'chain:3', 'chain:7']
    """

    tree: Policy

    def __init__(self, tree: Policy):
        super().__init__(tree)
        self.in_place = tree.in_place
        depths = sorted({max(self.max_depth >> half, 1) for half in range(4)})
        self.levels = (StaticTree([]), *(tree.cut(depth) for depth in depths[:-1]), tree)

    def cut(self, depth: int) -> Self:
        return type(self)(self.tree.cut(depth))

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        for level in self.levels[1:]:
            level.check(drafter, expansion)

    def bias(self, expansion: Expansion) -> str:
        return self.tree.bias(expansion)

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose the deepest of its trees."""
        return self.tree.grow(drafter, state, committed, children)
