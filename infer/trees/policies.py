"""How the tree grows: policies turn a drafter's proposals into a token tree.

A static tree fixes, for every node, its parent and its rank among its parent's children. Chains,
Cartesian products and measured sparse trees are all static trees.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headstart.heads import Drafter, OptionError, TokenTree, Topology
from headstart.heads.core import parents_of_paths
from headstart.heads.group import members

from .children import Children, Expansion, rows_of


@dataclass(slots=True)
class Committed:
    """What the last round (or the prefill) committed, as `Drafter.begin` takes it.

    Attributes:
        features: [B, A, F]; tokens: [B, A]; count: [B]; root: [B, 1], the last committed token.
        lengths: [B], cached tokens of each row; the root's position.
    """

    features: Tensor
    tokens: Tensor
    count: Tensor
    root: Tensor
    lengths: Tensor


FORMS = (
    "chain:4, cartesian:3,2,1, a JSON list of rank paths such as [[0],[1],[0,0]], or the path of a "
    ".json file that holds one"
)
"""How static trees are written."""


class Policy(Protocol):
    """Grows one tree a round."""

    @property
    def nodes(self) -> int:
        """N, the root counted; the same in every round."""
        ...

    @property
    def max_depth(self) -> int:
        """D, the deepest level."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether every accepted path already lies in the slots it is committed to (a chain)."""
        ...

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        """Refuse a tree that the drafter cannot fill, or that would bias children so chosen.

        Raises:
            OptionError: with the reason.
        """
        ...

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
        ...


def check_depth(tree: Policy, drafter: Drafter | None) -> None:
    """Refuse a tree without a drafter, or with several, or one that does not look as far ahead."""
    if drafter is None and tree.nodes > 1:
        raise OptionError(
            f"tree {tree} needs a drafter, found none; give one, or use tree 'plain'."
        )
    found = len(members(drafter))
    if found > 1 and tree.nodes > 1:
        raise OptionError(
            f"tree {tree} is grown by one drafter, found {found}; give a tree with a part for "
            f"each, such as {'+'.join(['chain:4'] * found)}."
        )
    deepest = None if drafter is None or found > 1 else drafter.max_depth
    if deepest is not None and tree.max_depth > deepest:
        raise OptionError(
            f"tree {tree} is {tree.max_depth} deep, but the drafter proposes {deepest} tokens; "
            "use a shallower tree or train more heads."
        )


@dataclass(frozen=True)
class Level:
    """One depth of a static tree: which proposals its nodes take, and which of them branch on."""

    ranks: int  # children to take per parent
    above: Tensor  # [W] the parents' numbers in the tree
    rows: Tensor  # [n] which of the parents each node has
    pick: Tensor  # [n] flat index (row * ranks + rank) of each node
    inner: Tensor  # [w] the level's nodes that have children
    parent: Tensor  # [w] of those, the parent among all inner nodes so far; -1 for the root


class StaticTree:
    """A tree whose shape is fixed beforehand.

    >>> StaticTree.cartesian([2, 1]).paths
    ((0,), (1,), (0, 0), (1, 0))
    >>> StaticTree.chain(3).nodes
    4
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
        return cls([[0] * length]) if length else cls([])

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> StaticTree:
        """Every node of depth d - 1 has widths[d - 1] children (SpecInfer's expansion)."""
        return cls(
            [path for d in range(len(widths)) for path in product(*map(range, widths[: d + 1]))]
        )

    @classmethod
    def parse(cls, text: str | Sequence[Sequence[int]]) -> StaticTree:
        """Read `chain:4`, `cartesian:3,2,1`, a list of rank paths, or a JSON file that holds one.

        Raises:
            OptionError: anything else.
        """
        if not isinstance(text, str):
            return cls(text)
        if (tree := cls.read(text)) is None:
            raise OptionError(f"tree is {text!r}; expected {FORMS}.")
        return tree

    @classmethod
    def read(cls, text: str) -> StaticTree | None:
        """What `parse` makes of a text; None where it is none of the forms."""
        name, _, argument = text.partition(":")
        try:
            if name == "plain":
                return cls([])
            if name in ("chain", "cartesian"):
                numbers = [int(number) for number in argument.split(",")]
                if min(numbers) > 0:
                    return cls.cartesian(numbers) if name == "cartesian" else cls.chain(*numbers)
            if text.endswith(".json"):
                return cls(json.loads(Path(text).read_text(encoding="utf-8")))
            if text.startswith("["):
                return cls(json.loads(text))
        except OptionError:
            raise
        except (ValueError, TypeError, OSError):
            pass
        return None

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank path of every node without the root."""
        found: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    def __str__(self) -> str:
        if self.nodes == 1:
            return "plain"
        if self.in_place and not any(self.ranks):
            return f"chain:{self.max_depth}"
        return "sparse:" + "/".join(str(self.depths.count(d)) for d in range(1, self.max_depth + 1))

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        """Refuse a tree that the drafter cannot fill, or gaps in the ranks of distinct draws.

        A draw that is left out would still have changed what the next one was drawn from.
        """
        check_depth(self, drafter)
        last = Counter(self.parents[1:])
        gaps = [n for n in range(1, self.nodes) if self.ranks[n] >= last[self.parents[n]]]
        if expansion == "without_replacement" and gaps:
            raise OptionError(
                f"tree {self} has {list(self.paths[gaps[0] - 1])} without all siblings before it, "
                f"which biases children drawn {expansion}; add them, or use 'topk' children."
            )

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        batch, device = committed.root.shape[0], committed.root.device
        topology, proposal_row = self.shape(batch, device)
        root, lengths = committed.root, committed.lengths  # [B, 1], [B]
        if drafter is None or self.nodes == 1:
            return TokenTree(root, topology, None, proposal_row)
        step = drafter.begin(state, committed.features, committed.tokens, committed.count)
        if drafter.independent and (step.logits is None or not children.sampled):
            level, step = self._independent(device), rows_of(step, 0, self.max_depth)
            taken = children.take(step, level.ranks, lengths, level.above, level.above)
            tokens = taken.flatten(1).index_select(1, level.pick)  # [B, N-1]
            # Only candidates and draft vocabularies narrower than the tree can leave nodes empty.
            holes = step.ids is not None or step.narrower_than(level.ranks)
            return TokenTree(*_filled(root, tokens, topology, holes), proposal_row)
        drawn, rows, logits, holes = [], [proposal_row[:, :1]], [], children.sampled
        for depth, level in enumerate(self._levels(device), start=1):
            here = rows_of(step, depth - 1, depth) if drafter.independent else step
            taken = children.take(here, level.ranks, lengths, depth, level.above)
            drawn.append(taken.flatten(1).index_select(1, level.pick))  # [B, n]
            holes = holes or here.ids is not None or here.narrower_than(level.ranks)
            if children.sampled and here.logits is not None:
                before = sum(proposals.shape[1] for proposals in logits)
                own = level.rows.clamp(max=here.logits.shape[1] - 1)  # heads have one for all
                rows.append((own + before).expand(batch, -1))
                logits.append(here.logits)
            else:
                rows.append(torch.full_like(drawn[-1], -1))
            if depth < self.max_depth and not drafter.independent:
                inner = drawn[-1].index_select(1, level.inner).clamp(min=0)
                step = drafter.extend(state, inner, level.parent.expand(batch, -1))
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

    @lru_cache(maxsize=8)  # noqa: B019 - trees are few and live as long as their speculator
    def shape(self, batch: int, device: torch.device) -> tuple[Topology, Tensor]:
        """The topology for `batch` rows, and its `proposal_row` [B, N]: all point masses."""
        topology = fixed_shape(self.parents, self.max_depth, device).expand(batch)
        return topology, torch.full_like(topology.parents, -1)

    @lru_cache(maxsize=8)  # noqa: B019
    def _levels(self, device: torch.device) -> list[Level]:
        levels, first, inner_so_far = [], 1, {0: -1}
        above, rows = [0], {0: 0}  # the parents, and each one's proposal row in the current Step
        for depth in range(1, self.max_depth + 1):
            members = range(first, first + self.depths.count(depth))
            ranks = max(self.ranks[node] for node in members) + 1
            pick = [rows[self.parents[node]] * ranks + self.ranks[node] for node in members]
            inner = [node for node in members if node in self._branching]
            parent = [inner_so_far[self.parents[node]] for node in inner]
            inner_so_far |= {node: len(inner_so_far) - 1 + i for i, node in enumerate(inner)}
            levels.append(
                Level(
                    ranks,
                    torch.tensor(above, device=device),
                    torch.tensor([rows[self.parents[node]] for node in members], device=device),
                    torch.tensor(pick, device=device),
                    torch.tensor([node - first for node in inner], device=device, dtype=torch.long),
                    torch.tensor([parent], device=device, dtype=torch.long),
                )
            )
            above = inner
            rows = {node: row for row, node in enumerate(inner)}
            first = members.stop
        return levels

    @lru_cache(maxsize=8)  # noqa: B019
    def _independent(self, device: torch.device) -> Level:
        ranks = max(self.ranks) + 1
        rows = torch.tensor(self.depths[1:], device=device) - 1
        pick = rows * ranks + torch.tensor(self.ranks[1:], device=device)
        depths = torch.arange(1, self.max_depth + 1, device=device)
        return Level(ranks, depths, rows, pick, pick[:0], pick[:0].unsqueeze(0))

    @cached_property
    def _branching(self) -> set[int]:
        return set(self.parents[1:])


def fixed_shape(parents: Sequence[int], max_depth: int, device: torch.device) -> Topology:
    """The topology of one row whose parents the host knows."""
    children = tuple(
        tuple(node for node in range(1, len(parents)) if parents[node] == parent)
        for parent in range(len(parents))
    )
    width = max(map(len, children))
    return Topology.from_parents(torch.tensor([parents], device=device), max_depth, width, children)


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
