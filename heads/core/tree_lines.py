"""What each node of a token tree sees, as a line of integers for each, in place of a mask.

A line is the first slot of the prefix that the node sees, the end of the prefix, and for each node
1 where it is seen. So a line is as long as the tree, not as the text, and does not depend on where
the text lies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .triton_here import has_triton


def _directly(tensor: Tensor) -> bool:
    """Whether torch's operators are called without operators of our own around them."""
    return tensor.is_cpu


def _kernels(tensor: Tensor) -> Any:
    if not has_triton(tensor):
        return None
    from . import tree_kernels

    return tree_kernels


def _pack(lengths: Tensor, positions: Tensor, ancestors: Tensor, window: int | None) -> Tensor:
    end = lengths.unsqueeze(1).expand_as(positions)
    first = torch.zeros_like(positions)
    if window is not None:
        oldest = positions - (window - 1)  # [B, G]
        first = oldest.clamp(min=0)
        ancestors = ancestors & (positions.unsqueeze(1) >= oldest.unsqueeze(-1))
    return torch.cat([torch.stack([first, end], -1), ancestors], -1).int()


def _grow(lines: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    width, seen = parent.shape[1], lines.shape[2]
    above = lines.gather(1, (parent + 1).unsqueeze(-1).expand(-1, -1, seen))
    grown = pad(torch.cat([lines, above], 1), (0, width))
    grown[:, -width:, -width:].diagonal(dim1=1, dim2=2).fill_(1)  # each sees itself
    # A line's sum is 0, its row's length, and the nodes from the first one down to its own.
    return grown, grown[:, 1:].sum(-1) - 1


@torch.library.custom_op("headstart::pack_tree", mutates_args=())
def _packed(lengths: Tensor, positions: Tensor, ancestors: Tensor, window: int | None) -> Tensor:
    run = _pack if (kernels := _kernels(lengths)) is None else kernels.pack
    return run(lengths, positions, ancestors, window)


@torch.library.custom_op("headstart::grow_lines", mutates_args=())
def _grown(lines: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    run = _grow if (kernels := _kernels(lines)) is None else kernels.grow
    return run(lines, parent)


def pack_tree(
    lengths: Tensor, positions: Tensor, ancestors: Tensor, window: int | None = None
) -> Tensor:
    """The lines of a tree, in the place of an additive mask; arguments as for `tree_mask`.

    Returns:
        [B, 1, G, 2 + G] int32.

    >>> ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    >>> pack_tree(torch.tensor([3]), torch.tensor([[3, 4, 4]]), ancestors, window=3)[0, 0].tolist()
    [[1, 3, 1, 0, 0], [2, 3, 1, 1, 0], [2, 3, 1, 0, 1]]
    """
    run = _pack if _directly(lengths) else _packed
    return run(lengths, positions, ancestors, window).unsqueeze(1)


def grow_lines(lines: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """The lines of a tree, without a window, once W nodes have been added to its G.

    Args:
        lines: [B, 1 + G, 2 + G] int32, the first of which sees the prefix alone, as a root that is
            part of it does.
        parent: [B, W] int64, which of the G nodes each new one follows; -1 for the first line.

    Returns:
        The lines [B, 1 + G + W, 2 + G + W], and the positions [B, G + W] int64 of all nodes.

    >>> lines, _ = grow_lines(torch.tensor([[[0, 5]]]).int(), torch.tensor([[-1, -1]]))
    >>> lines, positions = grow_lines(lines, torch.tensor([[1]]))
    >>> lines[0].tolist(), positions[0].tolist()
    ([[0, 5, 0, 0, 0], [0, 5, 1, 0, 0], [0, 5, 0, 1, 0], [0, 5, 0, 1, 1]], [5, 5, 6])
    """
    return (_grow if _directly(lines) else _grown)(lines, parent)
