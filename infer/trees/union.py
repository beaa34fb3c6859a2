"""The union of several drafters' trees: each grows its own part, the target verifies all at once.

Source: SpecInfer's merge of several small models' trees (Miao et al. 2024, arXiv 2305.09781). The
parts hang below one root, one drafter's after the other's, and are verified in one forward. The
union of `chain:2` and `[[0],[1]]`, whose drafters propose a b and a c:

    root ┬ a ─ b     of the first drafter
         ├ a         of the second; a duplicate sibling
         └ c

Duplicate siblings are not merged. A tree has the same number of nodes in every round, so merging
would not shorten the forward; where children are drawn it would bias the text; and rules that
follow the target's own choice walk down all duplicates at once (see `matching`), so what stands
below any of them can be accepted. The sampling rules accept one and go on with its children.

Where children are drawn, a rule tries the siblings of one drafter after those of another, each
with its own drafter's q. This is exact for every rule that is exact with one drafter, candidates
such as lookup's included (argued in `rejection`, proved by enumeration in test_exactness.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import Drafter, TokenTree, Topology
from headstart.heads.group import members

from .children import Children
from .expansions import Expansion
from .policy import Committed, Policy
from .shapes import UnionShape
from .static import StaticTree, fixed_shape


class Union(UnionShape, Policy):
    """Several trees under one root, one for each drafter of a `DrafterGroup`, in their order.

    Args:
        parts: at least two, none of them plain.

    Raises:
        OptionError: fewer parts, one without a node, or together more than the `limits` allow.

    >>> tree = Union([StaticTree.chain(2), StaticTree([[0], [1]])])
    >>> str(tree), tree.nodes, tree.max_depth
    ('chain:2+cartesian:2', 5, 2)
    >>> tree.shape(1, torch.device("cpu"))[0].parents.tolist()
    [[-1, 0, 1, 0, 0]]
    """

    def __init__(self, parts: Sequence[Policy]):
        super().__init__(parts)
        self._static = all(isinstance(part, StaticTree) for part in self.parts)
        self.shape = cache(self._shape)  # of static parts; kept as `StaticTree` keeps its own

    def cut(self, depth: int) -> Self:
        return type(self)([part.cut(min(depth, part.max_depth)) for part in self.parts])

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        super().check(drafter, expansion)
        for part, member in zip(self.parts, members(drafter), strict=True):
            part.check(member, expansion)

    def bias(self, expansion: Expansion) -> str:
        return next(filter(None, (part.bias(expansion) for part in self.parts)), "")

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        trees, first = [], 0
        for part, member in zip(self.parts, members(drafter), strict=True):
            own = replace(children, first=first)
            trees.append(part.grow(member, state, committed, own))
            first += part.nodes
        tokens = torch.cat([committed.root, *(tree.tokens[:, 1:] for tree in trees)], 1)  # [B, N]
        valid = None
        if any(tree.valid is not None for tree in trees):
            there = [torch.ones_like(t.tokens) > 0 if t.valid is None else t.valid for t in trees]
            valid = torch.cat([there[0], *(each[:, 1:] for each in there[1:])], 1)
        if not self._static:
            assert valid is not None, "a tree of changing shape says which nodes are valid"
            topology = self._grown(trees, valid)
            return TokenTree(tokens, topology, valid, torch.full_like(tokens, -1))
        topology, proposal_row = self.shape(tokens.shape[0], tokens.device)
        if all(tree.logits is None for tree in trees):
            return TokenTree(tokens, topology, valid, proposal_row)
        proposals = _proposals(trees, members(drafter)[0].config.vocab_size)
        replacement = children.expansion == "with_replacement"
        return TokenTree(tokens, topology, valid, *proposals, replacement, self._turns)

    @property
    def _turns(self) -> tuple[int, ...]:
        """Which of the root's children, by order, are the first of each part."""
        counts = (part.parents.count(0) for part in self.parts if isinstance(part, StaticTree))
        return (0, *accumulate(counts))[:-1]

    def _shape(self, batch: int, device: torch.device) -> tuple[Topology, Tensor]:
        parents = [-1]
        for part in self.parts:
            assert isinstance(part, StaticTree)
            first = len(parents) - 1
            parents += [parent + first if parent else 0 for parent in part.parents[1:]]
        return fixed_shape(parents, self.max_depth, batch, device)

    def _grown(self, trees: Sequence[TokenTree], valid: Tensor) -> Topology:
        """The topology where the shape of a part changes with every round."""
        shifted, first = [], 0
        for tree in trees:
            above = tree.topology.parents[:, 1:]
            shifted.append(torch.where(above > 0, above + first, above))
            first += tree.nodes - 1
        parents = pad(torch.cat(shifted, 1), (1, 0), value=-1)  # [B, N]
        width = sum(tree.topology.width for tree in trees)
        topology = Topology.from_parents(parents, self.max_depth, width)
        # Invalid nodes of one part hang on the root before the nodes of the next. They are not
        # counted, or a sibling's rank would exceed the bound on a node's children.
        siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)) & valid.unsqueeze(1)
        return replace(topology, rank=siblings.tril(-1).sum(-1))


def _proposals(trees: Sequence[TokenTree], vocab: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The union's proposal rows [B, N], its proposals [B, G, Vd], and their columns' tokens.

    Proposals over different vocabularies are spread over the target's `vocab`, -inf where a drafter
    does not know a token: the softmax of what is left is the same.
    """
    proposal_row, logits, before = [torch.full_like(trees[0].proposal_row[:, :1], -1)], [], 0
    for tree in trees:
        own = tree.proposal_row[:, 1:]
        proposal_row.append(torch.where(own < 0, own, own + before))
        if tree.logits is not None:
            before += tree.logits.shape[1]
            logits.append(tree.logits)
    drawn = [tree for tree in trees if tree.logits is not None]
    vocabulary = drawn[0].vocabulary
    widths = {each.shape[-1] for each in logits}
    if any(tree.vocabulary is not vocabulary for tree in drawn) or len(widths) > 1:
        widest = max(vocab, *widths)
        logits = [_spread(tree, widest) for tree in drawn]
        vocabulary = None
    return torch.cat(proposal_row, 1), torch.cat(logits, 1), vocabulary


def _spread(tree: TokenTree, vocab: int) -> Tensor:
    """A tree's proposals with each in the column of its token, [B, G, vocab]; -inf elsewhere."""
    logits = tree.logits
    assert logits is not None
    if tree.vocabulary is None:
        return pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
    empty = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return empty.index_copy(2, tree.vocabulary, logits)
