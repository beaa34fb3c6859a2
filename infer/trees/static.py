"""Static trees: the parent of every node, and its rank among its siblings, are fixed beforehand.

Chains, Cartesian products and measured sparse trees are all static trees.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import Drafter, Step, TokenTree, Topology

from .children import Children, rows_of
from .expansions import Expansion
from .paths import RankPaths
from .policy import Committed, Policy


@dataclass(frozen=True)
class Level:
    """One depth of a static tree: n nodes below W parents, w of which have children themselves.

    A choice that takes all in their order is None, and costs no launch.
    """

    ranks: int  # children to take per parent
    above: Tensor  # [W] the parents' numbers in the tree
    rows: Tensor  # [n] which of the parents each node has
    pick: Tensor | None  # [n] each node among the children taken, row * ranks + rank
    inner: Tensor | None  # [w] which of the level's nodes have children
    parent: Tensor  # [1, w] of those, the parent among all inner nodes so far; -1 for the root


class StaticTree(RankPaths, Policy):
    """A tree whose shape is fixed beforehand, see `RankPaths`."""

    def __init__(self, paths: Sequence[Sequence[int]]):
        super().__init__(paths)
        # Captured CUDA graphs read these tensors, so they live as long as the policy.
        self.shape, self._levels = cache(self._shape), cache(self._make_levels)
        self._one_level = cache(self._make_one_level)

    def cut(self, depth: int) -> Self:
        return type(self)([path for path in self.paths if len(path) <= depth])

    def bias(self, expansion: Expansion) -> str:
        """See `Policy`: gaps in the ranks of distinct draws.

        A draw that is left out would still have changed what the next one was drawn from.
        """
        last = Counter(self.parents[1:])
        gaps = [n for n in range(1, self.nodes) if self.ranks[n] >= last[self.parents[n]]]
        if expansion != "without_replacement" or not gaps:
            return ""
        return (
            f"tree {self.label} has {list(self.paths[gaps[0] - 1])} without all siblings before "
            f"it, which biases children drawn {expansion}; add them, or use 'topk' children."
        )

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        root = committed.root
        topology, proposal_row = self.shape(root.shape[0], root.device)
        if drafter is None or self.nodes == 1:
            return TokenTree(root, topology, None, proposal_row)
        step = drafter.begin(state, committed.features, committed.tokens, committed.count)
        if drafter.independent and (step.logits is None or not children.sampled):
            level, step = self._one_level(root.device), rows_of(step, 0, self.max_depth)
            depths = level.above
            taken = children.take(step, level.ranks, committed.lengths, depths, depths)
            tokens = _picked(taken.flatten(1), level.pick)  # [B, N-1]
            filled = _filled(root, tokens, topology, _may_lack(step, level.ranks))
            return TokenTree(*filled, proposal_row)
        drawn, rows, logits, holes = [], [proposal_row[:, :1]], [], children.sampled
        for depth, level in enumerate(self._levels(root.device), start=1):
            here = rows_of(step, depth - 1, depth) if drafter.independent else step
            taken = children.take(here, level.ranks, committed.lengths, depth, level.above)
            drawn.append(_picked(taken.flatten(1), level.pick))  # [B, n]
            holes = holes or _may_lack(here, level.ranks)
            if children.sampled and here.logits is not None:
                before = sum(proposals.shape[1] for proposals in logits)
                own = level.rows.clamp(max=here.logits.shape[1] - 1)  # heads have one for all
                rows.append((own + before).expand(len(root), -1))
                logits.append(here.logits)
            elif children.sampled:
                rows.append(torch.full_like(drawn[-1], -1))
            if depth < self.max_depth and not drafter.independent:
                inner = _picked(drawn[-1], level.inner)
                inner = inner.clamp(min=0) if holes else inner
                step = drafter.extend(state, inner, level.parent.expand(len(root), -1))
        tokens = torch.cat(drawn, dim=1) if len(drawn) > 1 else drawn[0]
        filled = _filled(root, tokens, topology, holes)
        if not logits:
            return TokenTree(*filled, proposal_row)
        proposals = step.logits if drafter.independent else torch.cat(logits, dim=1)  # [B, G, Vd]
        replacement = children.expansion == "with_replacement"
        return TokenTree(*filled, torch.cat(rows, 1), proposals, step.vocabulary, replacement)

    def _shape(self, batch: int, device: torch.device) -> tuple[Topology, Tensor]:
        return fixed_shape(self.parents, self.max_depth, batch, device)

    def _make_levels(self, device: torch.device) -> list[Level]:
        parents, ranks, depths = self.parents, self.ranks, self.depths
        number = {0: -1}  # of the root and the inner nodes so far, as `Drafter.extend` counts them
        levels, first, above = [], 1, [0]

        def tensor(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        def choice(places: list[int], count: int) -> Tensor | None:
            return None if places == list(range(count)) else tensor(places)

        for depth in range(1, self.max_depth + 1):
            members = range(first, first + depths.count(depth))
            rows = [above.index(parents[node]) for node in members]
            count = 1 + max(ranks[node] for node in members)
            pick = [row * count + ranks[node] for row, node in zip(rows, members, strict=True)]
            inner = [node for node in members if node in parents]
            places, up = [node - first for node in inner], [number[parents[node]] for node in inner]
            number |= {node: len(number) - 1 + i for i, node in enumerate(inner)}
            chosen = choice(pick, len(above) * count), choice(places, len(members))
            levels.append(Level(count, tensor(above), tensor(rows), *chosen, tensor([up])))
            above, first = inner, members.stop
        return levels

    def _make_one_level(self, device: torch.device) -> Level:
        """All levels as one, for independent heads: their proposals for each depth are its rows."""
        count = 1 + max(self.ranks)
        rows = torch.tensor(self.depths[1:], device=device) - 1
        pick = rows * count + torch.tensor(self.ranks[1:], device=device)
        above = torch.arange(1, self.max_depth + 1, device=device)
        return Level(count, above, rows, pick, None, pick[:0].unsqueeze(0))


def _picked(values: Tensor, places: Tensor | None) -> Tensor:
    """The columns of values [B, n] at some places; all where there are none."""
    return values if places is None else values.index_select(1, places)


def _may_lack(step: Step, count: int) -> bool:
    """Whether a node may get fewer than `count` children that are not drawn."""
    return step.ids is not None or step.narrower_than(count)


def _filled(
    root: Tensor, tokens: Tensor, topology: Topology, holes: bool
) -> tuple[Tensor, Topology, Tensor | None]:
    """The first fields of a TokenTree: root [B, 1] and the other nodes' tokens [B, N-1].

    With `holes`, -1 may be among them: such nodes, and all below, are invalid and become 0.
    """
    valid = None
    if holes:
        there = pad(tokens >= 0, (1, 0), value=True)  # [B, N]
        paths = topology.paths
        valid = there.gather(1, paths.flatten(1)).view(paths.shape).all(-1)
        tokens = tokens.masked_fill(~valid[:, 1:], 0)
    return torch.cat([root, tokens], dim=1), topology, valid


def fixed_shape(
    parents: Sequence[int], max_depth: int, batch: int, device: torch.device
) -> tuple[Topology, Tensor]:
    """The topology of parents that the host knows, for `batch` rows; and `proposal_row` [B, N]."""
    children = tuple(
        tuple(node for node in range(1, len(parents)) if parents[node] == parent)
        for parent in range(len(parents))
    )
    width = max(map(len, children))
    one = Topology.from_parents(torch.tensor([parents], device=device), max_depth, width, children)
    topology = one.expand(batch)
    return topology, torch.full_like(topology.parents, -1)
