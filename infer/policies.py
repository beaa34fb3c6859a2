"""How the tree grows: policies turn a drafter's proposals into a token tree.

A static tree fixes, for every node, its parent and its rank among its parent's children. Chains,
Cartesian products and measured sparse trees are all static trees. Children are the drafter's best
tokens (`topk`), or the best after the noise that the target will use has been added (`coupled`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headstart.heads import Drafter, OptionError, Sampling, Step, TokenTree, Topology
from headstart.heads.core import parents_of_paths


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


Expansion = Literal["topk", "coupled", "with_replacement", "without_replacement"]


@dataclass(frozen=True)
class Children:
    """How a node's children are chosen from the drafter's proposals.

    Attributes:
        expansion: `topk` takes the best tokens; `coupled` the best after the noise that the target
            will use has been added; `with_replacement` draws them independently, as SpecInfer does;
            `without_replacement` draws distinct ones, as Sequoia does.
        sampling: seeds and processors; proposals follow its row-wise warpers.
    """

    expansion: Expansion = "topk"
    sampling: Sampling = Sampling()  # noqa: RUF009 - it is frozen


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

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
        ...


@dataclass(frozen=True)
class Level:
    """One depth of a static tree: which proposals its nodes take, and which of them branch on."""

    ranks: int  # children to rank per proposal row
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
        raise OptionError(
            f"tree is {text!r}; expected chain:4, cartesian:3,2,1, a JSON list of rank paths such "
            "as [[0],[1],[0,0]], or the path of a .json file that holds one."
        )

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

    def check(self, drafter: Drafter | None) -> None:
        """Refuse a tree that the drafter cannot fill."""
        if drafter is None and self.nodes > 1:
            raise OptionError(
                f"tree {self} needs a drafter, found none; give one, or use tree 'plain'."
            )
        deepest = None if drafter is None else drafter.max_depth
        if deepest is not None and self.max_depth > deepest:
            raise OptionError(
                f"tree {self} is {self.max_depth} deep, but the drafter proposes {deepest} tokens; "
                "use a shallower tree or train more heads."
            )

    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        noise = children.sampling if children.expansion == "coupled" else None
        batch, device = committed.root.shape[0], committed.root.device
        topology, qrow = self.shape(batch, device)
        root = committed.root  # [B, 1]
        if drafter is None or self.nodes == 1:
            return TokenTree(root, topology, None, qrow)
        step = drafter.begin(state, committed.features, committed.tokens, committed.count)
        if drafter.independent:
            drawn = [self._take(self._independent(device), step, committed, noise, None)]
        else:
            drawn = []
            for depth, level in enumerate(self._levels(device), start=1):
                tokens = self._take(level, step, committed, noise, depth)  # [B, n]
                drawn.append(tokens)
                if depth < self.max_depth:
                    inner = tokens.index_select(1, level.inner).clamp(min=0)
                    step = drafter.extend(state, inner, level.parent.expand(batch, -1))
        tokens = torch.cat(drawn, dim=1) if len(drawn) > 1 else drawn[0]
        # Only candidate lists and draft vocabularies narrower than the tree can leave nodes empty.
        valid = None
        if step.ids is not None or step.narrower_than(max(self.ranks) + 1):
            valid = torch.cat([torch.ones_like(root, dtype=torch.bool), tokens >= 0], dim=1)
            tokens = tokens.clamp(min=0)
        return TokenTree(torch.cat([root, tokens], dim=1), topology, valid, qrow)

    def _take(
        self,
        level: Level,
        step: Step,
        committed: Committed,
        noise: Sampling | None,
        depth: int | None,
    ) -> Tensor:
        scores = None
        if noise is not None and step.logits is not None:
            rows = step.logits.shape[1]
            # Independent heads answer for depths 1 … K at once, the others for one depth.
            depths = torch.arange(1, rows + 1, device=level.pick.device) if depth is None else depth
            positions = (committed.lengths.unsqueeze(1) + depths).expand(-1, rows)  # [B, W]
            scores = noise.perturb(noise.warp(step.logits), positions, step.vocabulary)
        return step.top(level.ranks, scores).flatten(1).index_select(1, level.pick)  # [B, n]

    @lru_cache(maxsize=8)  # noqa: B019 - trees are few and live as long as their speculator
    def shape(self, batch: int, device: torch.device) -> tuple[Topology, Tensor]:
        """The topology for `batch` rows, and its `qrow` [B, N]: every child is a point mass."""
        parents = torch.tensor([self.parents], device=device)
        topology = Topology.from_parents(parents, self.max_depth, self.width).expand(batch)
        return topology, torch.full_like(topology.parents, -1)

    @lru_cache(maxsize=8)  # noqa: B019
    def _levels(self, device: torch.device) -> list[Level]:
        levels, first, inner_so_far = [], 1, {0: -1}
        rows = {0: 0}  # node -> its proposal row in the current Step
        for depth in range(1, self.max_depth + 1):
            members = range(first, first + self.depths.count(depth))
            ranks = max(self.ranks[node] for node in members) + 1
            pick = [rows[self.parents[node]] * ranks + self.ranks[node] for node in members]
            inner = [node for node in members if node in self._branching]
            parent = [inner_so_far[self.parents[node]] for node in inner]
            rows = {node: row for row, node in enumerate(inner)}
            inner_so_far |= {node: len(inner_so_far) - 1 + i for i, node in enumerate(inner)}
            levels.append(
                Level(
                    ranks,
                    torch.tensor(pick, device=device),
                    torch.tensor([node - first for node in inner], device=device, dtype=torch.long),
                    torch.tensor([parent], device=device, dtype=torch.long),
                )
            )
            first = members.stop
        return levels

    @lru_cache(maxsize=8)  # noqa: B019
    def _independent(self, device: torch.device) -> Level:
        ranks = max(self.ranks) + 1
        nodes = zip(self.depths[1:], self.ranks[1:], strict=True)
        pick = torch.tensor([(depth - 1) * ranks + rank for depth, rank in nodes], device=device)
        return Level(ranks, pick, pick[:0], pick[:0].unsqueeze(0))

    @cached_property
    def _branching(self) -> set[int]:
        return set(self.parents[1:])
