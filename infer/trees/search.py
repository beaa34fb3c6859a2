"""Level-by-level search for trees whose shape follows the drafter's own probabilities.

Such trees are new in every round. Nodes are ranked and dropped by what the drafter proposed, so
children must be a function of the proposals (`topk`, `coupled`); drawn ones would be biased.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import Drafter, Step, TokenTree, Topology
from headstart.heads.core import best_log_probabilities

from .candidates import NEVER, SearchLevel, beam_ends, grow_level, select_nodes
from .children import Children, rows_of
from .expansions import SAMPLED, Expansion
from .limits import check_size
from .policy import Committed, Policy
from .shapes import BeamShape, BestFirstShape


class SearchedTree(Policy):
    """A policy that ranks and drops nodes, and so refuses drawn children."""

    width: int  # children that a node may have

    def bias(self, expansion: Expansion) -> str:
        if expansion not in SAMPLED:
            return ""
        return (
            f"tree {self} keeps the children that score best, which biases children drawn "
            f"{expansion}; use 'topk' or 'coupled' children, or a static tree."
        )

    @abstractmethod
    def extended(self, drafter: Drafter) -> int:
        """How many nodes of a level are extended."""

    @abstractmethod
    def candidates(self, levels: Sequence[SearchLevel]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, scores and parents of a search's candidates, see `select`."""

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        assert drafter is not None
        levels = self._search(drafter, state, committed, children)
        return self.select(committed.root, *self.candidates(levels))

    def _search(
        self, drafter: Drafter, state: Any, committed: Committed, children: Children
    ) -> list[SearchLevel]:
        """Level by level, extend the best nodes with their best `width` children each."""
        assert not children.sampled, "check() refuses drawn children"
        width, depth, lengths = self.width, self.max_depth, committed.lengths
        frontier = self.extended(drafter)
        step = drafter.begin(state, committed.features, committed.tokens, committed.count)
        heads = None
        if drafter.independent:
            depths = torch.arange(1, depth + 1, device=lengths.device)
            heads = best_children(children, rows_of(step, 0, depth), width, lengths, depths)
        above = torch.zeros_like(lengths, dtype=torch.float64).unsqueeze(1)  # [B, F], the root's
        levels: list[SearchLevel] = []
        first = -1  # the number of the first extended node, among all that the drafter has grown
        for level in range(1, depth + 1):
            if heads is not None:  # one row for all nodes of a level
                ids, scores = (values[:, level - 1 : level] for values in heads)
            else:
                ids, scores = best_children(children, step, width, lengths, level)
            keep = min(frontier, above.shape[1] * width)
            found = grow_level(ids, scores, above, keep, first)
            levels.append(found)
            if level < depth and heads is None:
                step = drafter.extend(state, found.inner, found.parent)
            first += above.shape[1]
            above = found.best
        return levels

    def select(self, root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor) -> TokenTree:
        """The tree of the root [B, 1] and the best N - 1 of C candidates, in their order.

        Args:
            tokens: [B, C].
            scores: [B, C], nowhere above the parent's; -inf candidates are left out, and what is
                missing to N is invalid, at the end, and hangs on the root.
            parents: [B, C], 0 for the root, c + 1 for candidate c, which comes earlier.

        >>> tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
        >>> scores = torch.tensor([[-1.0, -3.0, -2.0, -9.0]])
        >>> tree = BestFirst(4, 2, 2).select(torch.tensor([[9]]), tokens, scores, parents)
        >>> tree.tokens.tolist(), tree.topology.parents.tolist()
        ([[9, 5, 6, 7]], [[-1, 0, 0, 1]])
        """
        tokens, above, valid = select_nodes(root, tokens, scores, parents, self.nodes)
        topology = Topology.from_parents(above, self.max_depth, self.width)
        return TokenTree(tokens, topology, valid, torch.full_like(tokens, -1))


class BestFirst(BestFirstShape, SearchedTree):
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
        OptionError: numbers that make no tree, leave nodes without a use, or exceed the `limits`.
    """

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        super().check(drafter, expansion)
        assert drafter is not None
        check_size(str(self), candidates=self.ranked(self.extended(drafter)))
        self.check_ranked(self.extended(drafter))

    def cut(self, depth: int) -> Self:
        """See `Policy`: of as many nodes, or of all that are ranked down to there."""
        ranked = self.ranked(self.frontier or self.width, depth)
        return type(self)(min(self.nodes, ranked + 1), self.width, depth, self.frontier)

    def extended(self, drafter: Drafter) -> int:
        return self.frontier or (self.nodes - 1 if drafter.independent else self.width)

    def candidates(self, levels: Sequence[SearchLevel]) -> tuple[Tensor, Tensor, Tensor]:
        parents, first = [torch.zeros_like(levels[0].tokens)], 1
        for level in levels[:-1]:
            parents.append((level.kept + first).repeat_interleave(self.width, dim=1))  # [B, C]
            first += level.tokens.shape[1]
        tokens = torch.cat([level.tokens for level in levels], dim=1)
        return tokens, torch.cat([level.scores for level in levels], dim=1), torch.cat(parents, 1)


class Beam(BeamShape, SearchedTree):
    """The union of the paths that a beam search ends with (ReDrafter, arXiv 2403.09919).

    Each level keeps the best `width` pairs of a beam and a token. Beams with a common beginning
    share its nodes; nodes on no final beam are dropped. Where the search runs dry before `length`,
    the final beams are the last that there were.

    Args:
        width: beams; length: D, tokens of each.
        nodes: N, the root counted; the worst beams are cut first. None for 1 + width * length.

    Raises:
        OptionError: numbers that make no tree, leave nodes without a use, or exceed the `limits`.
    """

    def cut(self, depth: int) -> Self:
        return type(self)(self.width, depth, min(self.nodes, 1 + self.width * depth))

    def extended(self, drafter: Drafter) -> int:
        return self.width

    def candidates(self, levels: Sequence[SearchLevel]) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.cat([level.inner for level in levels], dim=1)
        parents = torch.cat([level.parent for level in levels], dim=1)  # [B, D * width]
        kept = torch.stack([level.kept for level in levels], dim=1)  # [B, D, width]
        best = torch.stack([level.best for level in levels], dim=1)
        return tokens, beam_ends(kept, best).flatten(1), parents + 1


def best_children(
    children: Children, step: Step, count: int, lengths: Tensor, depth: int | Tensor
) -> tuple[Tensor, Tensor]:
    """The best children of W nodes and their log-probabilities, [B, W, count] both.

    After `coupled` noise these are the log-softmax of the noisy scores. Candidates whose
    probabilities are not known count as e^0, e^-1, … in their order. Missing children are at -inf,
    or at NaN.
    """
    scores, sampling = children.scores(step, lengths, depth), children.sampling
    known = step.logits if step.ids is None else step.log_probs
    if known is None:
        ids = step.top(count)
        order = torch.arange(count, dtype=torch.float64, device=ids.device)
        return ids, torch.where(ids < 0, NEVER, -order)
    if scores is None:
        scores = known if sampling.seeds is None else sampling.warp(known)
    most = min(count, scores.shape[-1])
    values, columns = best_log_probabilities(scores, most)  # [B, W, most]
    if step.ids is None:
        step.note(values[..., 0])
        ids = step.named(columns)
    else:
        ids = step.ids.gather(-1, columns)
    missing = (0, count - most)
    if most == count:
        return ids, values
    return pad(ids, missing, value=-1), pad(values, missing, value=NEVER)
