"""Training of a drafter that reads mask tokens for what is not known yet, in one pass.

Such a drafter makes all drafts of a round at once: after the newest token it reads a mask for every
draft but the first. In training, the masks of all positions that drafts start from come after the
text, those of a start side by side:

    entries      0 … T - 1    of start t, one for each of the depths 2 … k
    hold         the text     masks, at the positions after the newest token

A mask sees the text up to its start's newest token, and the masks before it in its block. A step
may ask a start for fewer depths (conditional drop-token: PARD, arXiv 2504.18583), and the masks of
those that are not asked for are left out.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..core import AttentionWindows
from .draft_attention import Mask, text_and_block_mask


def depth_shares(depths: int, kept: float, least_kept: float) -> list[float]:
    """At which share of the positions a step asks for each depth; at all of them for the first.

    >>> [round(share, 2) for share in depth_shares(5, kept=0.7, least_kept=0.4)]
    [1.0, 0.7, 0.49, 0.4, 0.4]
    """
    return [1.0, *(max(kept**depth, least_kept) for depth in range(1, depths))]


@dataclass(frozen=True)
class MaskBlocks:
    """The entries of one pass: B rows of a text of T and, after it, of Q masks; S = T + Q.

    Attributes:
        begin: [B, T] the entry at which each entry's document begins.
        positions: [B, S] each entry's position in its document.
        start: [B, Q] which entry of the text each mask's drafts start from.
        newest: how many entries after its start a start's newest token is.
    """

    begin: Tensor
    positions: Tensor
    start: Tensor
    newest: int
    depths: int
    _where: Tensor
    _first: Tensor  # [B, T] of each start, which mask is its first

    @classmethod
    def of(
        cls,
        where: Tensor,
        depths: int,
        positions: Tensor | None,
        wanted: Tensor | None,
        newest: int,
    ) -> Self:
        """The entries of a step; the arguments are as of `TrainableDrafter.draft_hidden_states`."""
        every = torch.arange(where.shape[1], device=where.device).expand_as(where)
        positions = every if positions is None else positions
        numbers = torch.arange(1, depths + 1, device=where.device).unsqueeze(1)
        deepest = torch.zeros_like(every)
        deepest[where] = depths if wanted is None else (numbers * wanted).amax(0)
        first, start, depth = _blocks((deepest - 1).clamp(min=0), depths)
        # A state that needs a token past the row's end may be anything.
        places = positions.gather(1, start) + (newest - 1) + depth
        whole = torch.cat([positions, places.clamp(max=where.shape[1] - 1)], 1)
        return cls(every - positions, whole, start, newest, depths, where, first)

    def attention(self, windows: AttentionWindows, **options: Any) -> Mask | dict[str, Mask]:
        """What every entry sees, for each type of layer where some of them have a window.

        Args:
            options: of `text_and_block_mask`.
        """
        length = self.begin.shape[1]
        every = torch.arange(length, device=self.start.device).expand_as(self.begin)
        at = torch.cat([every, (self.start + self.newest).clamp(max=length - 1)], 1)
        begin = torch.cat([self.begin, self.begin.gather(1, self.start)], 1)
        block = torch.cat([torch.full_like(every, -1), self.start], 1)

        def mask(window: int | None) -> Mask:
            first = begin
            if window is not None:
                first = begin + (self.positions - window + 1).clamp(min=0)
            sizes = length, max(self.depths - 1, 1), window
            return text_and_block_mask(at, first, block, *sizes, **options)

        return windows.masks(mask)

    def states(self, hidden: Tensor) -> Tensor:
        """Of the states [B, S, D'] of all entries those of each depth.  # [K, M, D']"""
        length = self.begin.shape[1]
        row, at = self._where.nonzero(as_tuple=True)  # [M] each
        entries = [(at + self.newest).clamp(max=length - 1)]
        entries += [length + self._first[row, at] + k - 2 for k in range(2, self.depths + 1)]
        return hidden[row, torch.stack(entries).clamp(max=hidden.shape[1] - 1)]


def _blocks(masks: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the masks of each start stand, one start's after another's.

    Args:
        masks: [B, T] how many each start has.
        longest: no depth is deeper.

    Returns:
        [B, T] the slot of each start's first mask, and of each slot [B, Q], Q those of the row with
        the most, its start and its depth; slots past a row's own are given to its last position.

    >>> first, start, depth = _blocks(torch.tensor([[2, 0, 1], [0, 1, 0]]), 3)
    >>> first.tolist(), start.tolist(), depth.tolist()
    ([[0, 2, 2], [0, 0, 1]], [[0, 0, 2], [1, 2, 2]], [[2, 3, 2], [2, 2, 3]])
    """
    ends = masks.cumsum(1)
    first = ends - masks
    slots = torch.arange(int(ends[:, -1].max()), device=masks.device).expand(len(masks), -1)
    start = torch.searchsorted(ends, slots.contiguous(), right=True)
    start = start.clamp(max=masks.shape[1] - 1)
    depth = (slots - first.gather(1, start) + 2).clamp(max=longest)
    return first, start, depth
