"""Static trees: the parent of every node, and its rank among its siblings, are fixed beforehand.

Chains, Cartesian products and measured sparse trees are all static trees.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from headstart.heads import Drafter, OptionError, Step, TokenTree, Topology
from headstart.heads.core import parents_of_paths

from .children import Children, Expansion, rows_of
from .levels import Level, fixed_shape, make_levels, make_one_level
from .policy import Committed, Policy, made_once


class StaticTree(Policy):
    """A tree whose shape is fixed beforehand.

    >>> StaticTree.cartesian([2, 1]).paths
    ((0,), (1,), (0, 0), (1, 0))
    >>> str(StaticTree([[0], [1], [0, 0]]))
    '[[1],[0,0]]'
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        """Build from rank paths, see `parents_of_paths`; no path at all is plain decoding.

        Raises:
            OptionError: not a list of non-empty lists of whole numbers from 0.
        """
        try:
            good = all(
                path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths
            )
        except TypeError:
            good = False
        if not good:
            raise OptionError(
                "a tree is a list of non-empty paths of ranks from 0, such as [[0], [1], [0, 0]]; "
                f"found {str(paths)[:60]}."
            )
        self.parents, self.ranks, self.depths = parents_of_paths(paths)
        self.max_depth = max(self.depths)
        self.nodes = len(self.parents)
        self.width = max(Counter(self.parents[1:]).values(), default=0)
        self.in_place = self.nodes == self.max_depth + 1

    @classmethod
    def chain(cls, length: int) -> StaticTree:
        """One path of the best token at each depth."""
        return cls.cartesian([1] * length)

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> StaticTree:
        """Every node of depth d - 1 has widths[d - 1] children (SpecInfer's expansion)."""
        return cls(list(product(*map(range, widths))) if widths else [])

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank path of every node without the root."""
        found: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    def __str__(self) -> str:
        """`plain`, `chain:…`, `cartesian:…`, or the rank paths of the leaves of another tree."""
        counts = [self.depths.count(depth) for depth in range(self.max_depth + 1)]
        widths = [below // above for above, below in pairwise(counts)]
        if self.nodes == 1:
            return "plain"
        if not all(widths) or StaticTree.cartesian(widths).paths != self.paths:
            leaves = [path for node, path in enumerate(self.paths, 1) if node not in self.parents]
            return json.dumps(leaves, separators=(",", ":"))
        if self.in_place:
            return f"chain:{self.max_depth}"
        return "cartesian:" + ",".join(map(str, widths))

    @property
    def label(self) -> str:
        """`sparse` and the nodes of each level for a list of rank paths, else the text form."""
        if not (text := str(self)).startswith("["):
            return text
        counts = (self.depths.count(depth) for depth in range(1, self.max_depth + 1))
        return "sparse " + "/".join(map(str, counts))

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        """See `Policy`; refuses gaps in the ranks of distinct draws.

        A draw that is left out would still have changed what the next one was drawn from.
        """
        super().check(drafter, expansion)
        last = Counter(self.parents[1:])
        gaps = [n for n in range(1, self.nodes) if self.ranks[n] >= last[self.parents[n]]]
        if expansion == "without_replacement" and gaps:
            raise OptionError(
                f"tree {self.label} has {list(self.paths[gaps[0] - 1])} without all siblings "
                f"before it, which biases children drawn {expansion}; add them, or use 'topk' "
                "children."
            )

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
        root = committed.root
        topology, proposal_row = self.shape(root.shape[0], root.device)
        if drafter is None or self.nodes == 1:
            return TokenTree(root, topology, None, proposal_row)
        step = drafter.begin(state, committed.features, committed.tokens, committed.count)
        if drafter.independent and (step.logits is None or not children.sampled):
            level, step = self._one_level(root.device), rows_of(step, 0, self.max_depth)
            depths = level.above
            taken = children.take(step, level.ranks, committed.lengths, depths, depths)
            tokens = taken.flatten(1).index_select(1, level.pick)  # [B, N-1]
            return TokenTree(
                *_filled(root, tokens, topology, _may_lack(step, level.ranks)), proposal_row
            )
        drawn, rows, logits, holes = [], [proposal_row[:, :1]], [], children.sampled
        for depth, level in enumerate(self._levels(root.device), start=1):
            here = rows_of(step, depth - 1, depth) if drafter.independent else step
            taken = children.take(here, level.ranks, committed.lengths, depth, level.above)
            drawn.append(taken.flatten(1).index_select(1, level.pick))  # [B, n]
            holes = holes or _may_lack(here, level.ranks)
            if children.sampled and here.logits is not None:
                before = sum(proposals.shape[1] for proposals in logits)
                own = level.rows.clamp(max=here.logits.shape[1] - 1)  # heads have one for all
                rows.append((own + before).expand(len(root), -1))
                logits.append(here.logits)
            else:
                rows.append(torch.full_like(drawn[-1], -1))
            if depth < self.max_depth and not drafter.independent:
                inner = drawn[-1].index_select(1, level.inner).clamp(min=0)
                step = drafter.extend(state, inner, level.parent.expand(len(root), -1))
        tokens = torch.cat(drawn, dim=1) if len(drawn) > 1 else drawn[0]
        filled = _filled(root, tokens, topology, holes)
        if not logits:
            return TokenTree(*filled, proposal_row)
        return TokenTree(
            *filled,
            torch.cat(rows, dim=1),
            step.logits if drafter.independent else torch.cat(logits, dim=1),  # [B, G, Vd]
            step.vocabulary,
            children.expansion == "with_replacement",
        )

    @made_once
    def shape(self, batch: int, device: torch.device) -> tuple[Topology, Tensor]:
        """The topology for `batch` rows, and its `proposal_row` [B, N]: all point masses."""
        topology = fixed_shape(self.parents, self.max_depth, device).expand(batch)
        return topology, torch.full_like(topology.parents, -1)

    @made_once
    def _levels(self, device: torch.device) -> list[Level]:
        return make_levels(self.parents, self.ranks, self.depths, device)

    @made_once
    def _one_level(self, device: torch.device) -> Level:
        return make_one_level(self.ranks, self.depths, self.max_depth, device)


def _may_lack(step: Step, count: int) -> bool:
    """Whether a node may get fewer than `count` children that are not drawn."""
    return step.ids is not None or step.narrower_than(count)


def _filled(
    root: Tensor, tokens: Tensor, topology: Topology, holes: bool
) -> tuple[Tensor, Topology, Tensor | None]:
    """The first fields of a TokenTree: root [B, 1] and the other nodes' tokens [B, N-1].

    Args:
        holes: whether -1 may be among the tokens; such nodes, and all below them, are invalid
            and become 0.
    """
    valid = None
    if holes:
        there = torch.nn.functional.pad(tokens >= 0, (1, 0), value=True)  # [B, N]
        paths = topology.paths
        valid = there.gather(1, paths.flatten(1)).view(paths.shape).all(-1)
        tokens = tokens.masked_fill(~valid[:, 1:], 0)
    return torch.cat([root, tokens], dim=1), topology, valid
