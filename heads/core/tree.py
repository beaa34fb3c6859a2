"""The token tree: what a drafter proposes and a target verifies in one forward.

Node 0 is the root: the last committed token, whose keys and values are not cached yet. Parents come
before their children, and siblings in the order in which they were drawn. B batch, N nodes (the
root counted), D the largest depth, G proposal rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .triton_here import has_triton

_MOST = 256  # nodes of a tree whose shape one launch derives


def ancestor_mask(parents: Tensor) -> Tensor:
    """Which nodes are on the path from the root to each node, the node itself included.

    Computed by pointer jumping in about log2(N) steps, on the device of `parents`.

    Args:
        parents: [B, N] int64, the parent of each node; -1 at the root.

    Returns:
        [B, N, N] bool; entry (b, i, j) says that j is i or an ancestor of i.

    >>> ancestor_mask(torch.tensor([[-1, 0, 0, 1]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    batch, nodes = parents.shape
    reach = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    jump = parents.clamp(min=0)  # [B, N], the root points at itself
    for _ in range(max(nodes - 1, 1).bit_length()):
        reach = reach | reach.gather(1, jump.unsqueeze(-1).expand_as(reach))
        jump = jump.gather(1, jump)
    return reach  # [B, N, N]


@dataclass(frozen=True)
class Topology:
    """The shape of a token tree, without its tokens.

    Attributes:
        parents: [B, N] int64, -1 at the root.
        depth: [B, N] int64, 0 at the root.
        ancestors: [B, N, N] bool, see `ancestor_mask`.
        paths: [B, N, D + 1] int64, the nodes from the root to each node, which then repeats.
        rank: [B, N] int64, how many siblings come before each node.
        max_depth: D, known on the host.
        width: the most children that a node has, or a bound on it, known on the host.
        children: the children of each node, where all rows share a shape that the host knows.
        masks: attention masks made for it, see `shifted_mask`.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    paths: Tensor
    rank: Tensor
    max_depth: int
    width: int
    children: tuple[tuple[int, ...], ...] | None = None
    masks: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_parents(
        cls,
        parents: Tensor,
        max_depth: int,
        width: int | None = None,
        children: tuple[tuple[int, ...], ...] | None = None,
    ) -> Topology:
        """Derive depth, ancestors, paths and ranks from `parents`; `width` is N - 1 when None.

        >>> shape = Topology.from_parents(torch.tensor([[-1, 0, 0, 1]]), max_depth=2)
        >>> shape.depth.tolist(), shape.paths[0].tolist(), shape.rank.tolist()
        ([[0, 1, 1, 2]], [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3]], [[0, 0, 1, 0]])
        """
        derive: Any = _shape_launch if _has_kernels(parents) else _shape
        width = parents.shape[1] - 1 if width is None else width
        depth, ancestors, paths, rank = derive(parents, max_depth)
        return cls(parents, depth, ancestors, paths, rank, max_depth, width, children)

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.parents.shape[1]

    @cached_property
    def parent_or_root(self) -> Tensor:
        """[B, N] parents with the root pointing at itself, safe to gather with."""
        return self.parents.clamp(min=0)

    @cached_property
    def steps_to(self) -> Tensor:
        """[B, N] the nodes from the root to each node, both counted: depth + 1."""
        return self.depth + 1

    @cached_property
    def below_root(self) -> Tensor:
        """[B, N, D] the nodes from the root's child to each node, numbered through all rows."""
        below = self.paths[:, :, 1:]
        return below if self._firsts is None else below + self._firsts.view(-1, 1, 1)

    def path_to(self, node: Tensor) -> Tensor:
        """[B, D + 1] the path to each row's node [B], see `paths`."""
        node = node if self._firsts is None else node + self._firsts
        return self._lines.index_select(0, node)

    @cached_property
    def _lines(self) -> Tensor:
        return self.paths.flatten(0, 1)  # [B * N, D + 1]

    @cached_property
    def _firsts(self) -> Tensor | None:
        """[B] each row's root, numbered through all rows; None for one row."""
        if (batch := len(self.parents)) == 1:
            return None
        return torch.arange(0, batch * self.nodes, self.nodes, device=self.parents.device)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The most children of a node of depth 0 … D - 1, or a bound on it, known on the host."""
        if self.children is None:
            return (self.width,) * self.max_depth
        widths, level = [], [0]
        for _ in range(self.max_depth):
            widths.append(max((len(self.children[node]) for node in level), default=0))
            level = [child for node in level for child in self.children[node]]
        return tuple(widths)

    def expand(self, batch: int) -> Topology:
        """The same shape for `batch` rows, without copying; needs a topology of one row."""
        tensors = (self.parents, self.depth, self.ancestors, self.paths, self.rank)
        each = (tensor.expand(batch, *tensor.shape[1:]) for tensor in tensors)
        return Topology(*each, max_depth=self.max_depth, width=self.width, children=self.children)


def _shape(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depth, ancestors, paths and ranks, see `Topology`."""
    ancestors = ancestor_mask(parents)  # [B, N, N]
    depth = ancestors.sum(-1) - 1  # [B, N]
    levels = torch.arange(max_depth + 1, device=parents.device)
    wanted = torch.minimum(levels, depth.unsqueeze(-1))  # [B, N, D+1]
    at_level = depth[:, None, None, :] == wanted.unsqueeze(-1)  # [B, N, D+1, N]
    paths = (ancestors.unsqueeze(2) & at_level).byte().argmax(-1)  # [B, N, D+1]
    siblings = parents.unsqueeze(1) == parents.unsqueeze(2)  # [B, N, N]
    return depth, ancestors, paths, siblings.tril(-1).sum(-1)


def _has_kernels(parents: Tensor) -> bool:
    return parents.shape[1] <= _MOST and has_triton(parents)


@torch.library.custom_op("headstart::tree_shape", mutates_args=())
def _kernel(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not has_triton(parents):
        return _shape(parents, max_depth)
    from . import tree_kernels

    return tree_kernels.shape(parents, max_depth)


_shape_launch: Any = _kernel


@dataclass(slots=True)
class TokenTree:
    """A batch of token trees of N nodes.

    Attributes:
        tokens: [B, N] int64; column 0 is the root.
        topology: parents, depth, ancestors and paths.
        valid: [B, N] bool, or None when every node may be accepted.
        proposal_row: [B, N] int64, the proposal row a node was drawn from; -1 marks a point mass.
        logits: [B, G, Vd] the proposals' raw logits, only for rules that need them; None when every
            node is a point mass.
        vocabulary: [Vd] target ids that the columns of `logits` stand for; 0 … V - 1 when None.
        replacement: whether siblings were drawn with replacement.
        turns: with several drafters, the number of the root's child at which each one's own begin.
    """

    tokens: Tensor
    topology: Topology
    valid: Tensor | None
    proposal_row: Tensor
    logits: Tensor | None = None
    vocabulary: Tensor | None = None
    replacement: bool = False
    turns: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.tokens.shape[1]
