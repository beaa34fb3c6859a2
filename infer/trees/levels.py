"""Which proposals the nodes of a static tree take, level by level, as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import Topology


@dataclass(frozen=True)
class Level:
    """One depth of a static tree: n nodes below W parents, w of which have children themselves."""

    ranks: int  # children to take per parent
    above: Tensor  # [W] the parents' numbers in the tree
    rows: Tensor  # [n] which of the parents each node has
    pick: Tensor  # [n] each node among the children taken, row * ranks + rank
    inner: Tensor  # [w] which of the level's nodes have children
    parent: Tensor  # [1, w] of those, the parent among all inner nodes so far; -1 for the root


def make_levels(
    parents: Sequence[int], ranks: Sequence[int], depths: Sequence[int], device: torch.device
) -> list[Level]:
    """The levels of a tree from each node's parent, rank and depth, see `parents_of_paths`."""
    levels, first, branching = [], 1, set(parents)
    number = {0: -1}  # of the root and the inner nodes so far, as `Drafter.extend` counts them
    above = [0]

    def tensor(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    for depth in range(1, max(depths) + 1):
        members = range(first, first + depths.count(depth))
        rows = [above.index(parents[node]) for node in members]
        count = 1 + max(ranks[node] for node in members)
        pick = [row * count + ranks[node] for row, node in zip(rows, members, strict=True)]
        inner = [node for node in members if node in branching]
        places, up = [node - first for node in inner], [number[parents[node]] for node in inner]
        number |= {node: len(number) - 1 + i for i, node in enumerate(inner)}
        levels.append(Level(count, *map(tensor, (above, rows, pick, places, [up]))))
        above, first = inner, members.stop
    return levels


def make_one_level(
    ranks: Sequence[int], depths: Sequence[int], max_depth: int, device: torch.device
) -> Level:
    """All levels as one, for independent heads: their proposals for each depth are its rows."""
    count = 1 + max(ranks)
    rows = torch.tensor(depths[1:], device=device) - 1
    pick = rows * count + torch.tensor(ranks[1:], device=device)
    above = torch.arange(1, max_depth + 1, device=device)
    return Level(count, above, rows, pick, pick[:0], pick[:0].unsqueeze(0))


def fixed_shape(parents: Sequence[int], max_depth: int, device: torch.device) -> Topology:
    """The topology of one row whose parents the host knows."""
    children = tuple(
        tuple(node for node in range(1, len(parents)) if parents[node] == parent)
        for parent in range(len(parents))
    )
    width = max(map(len, children))
    return Topology.from_parents(torch.tensor([parents], device=device), max_depth, width, children)
