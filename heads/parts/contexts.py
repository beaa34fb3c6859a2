"""Contexts of places in a text, in order, so that those that read like given tokens are found.

A context is what leads up to a place, read backwards, so that contexts that end alike stand side by
side:

    place  0 1 2 3 4 5 6 7 8 9 10         in order   context         next token
    text   - a b c - a b d - b d              9      b -             d
                                              2      b a -           c
                                              6      b a - c b a -   d
"""

from typing import NamedTuple

import torch
from torch import Tensor

END, BEFORE = -1, -2  # between two texts, and before a request's first token

_BRANCHES = 512  # into which a step of the search divides what is left


class Contexts(NamedTuple):
    """Places of a text in the order of their contexts.

    Attributes:
        text: [N] int32, ids and `END`; at least P of the latter come before the first place.
        order: [N] int32; those from `places` on are none.
        places: how many there are, also as a tensor.
        length: P, the tokens of a context.
    """

    text: Tensor
    order: Tensor
    places: int | Tensor
    length: int

    def at(self, places: Tensor) -> Tensor:
        """The P tokens up to places [...] of the text, the newest first: [..., P]."""
        back = torch.arange(self.length, device=places.device)
        return self.text[places.unsqueeze(-1) - back]

    def rank(self, newest: Tensor) -> Tensor:
        """How many contexts of the order come before those given: [B, P] -> [B]."""
        low = newest.new_zeros(len(newest))  # the answer is in [low, low + width)
        width = len(self.order) + 1
        while width > 1:
            width = -(-width // _BRANCHES)
            step = torch.arange(width - 1, width * (_BRANCHES - 1), width, device=low.device)
            at = low.unsqueeze(1) + step
            keys = self.at(self.order[at.clamp(max=len(self.order) - 1)].long())  # [B, 511, P]
            given = newest.unsqueeze(1).expand_as(keys)
            # The first token that differs decides; where none does, the first one says no.
            differs = (keys != given).view(torch.uint8).argmax(-1, keepdim=True)
            before = (keys.gather(-1, differs) < given.gather(-1, differs)).squeeze(-1)
            low = low.add((before & (at < self.places)).sum(-1), alpha=width)
        return low

    def nearest(self, newest: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The places whose contexts begin with the most of the tokens given, the longest first.

        Args:
            newest: [B, P], the newest first; most: M, places of a row.

        Returns:
            How many tokens each has in common, and the places, [B, M] both.
        """
        window = torch.arange(2 * most, device=newest.device)
        near = self.rank(newest).unsqueeze(1) + (window - most)  # [B, 2M]
        places = self.order[near.clamp(0, len(self.order) - 1)].long()
        match = (self.at(places) == newest.unsqueeze(1)).cumprod(-1).sum(-1)  # [B, 2M]
        match = match.masked_fill((near < 0) | (near >= self.places), 0)
        best = (match * (2 * most) - window).topk(most, -1).indices  # no two alike; [B, M]
        return match.gather(1, best), places.gather(1, best)

    def following(self, places: Tensor, depth: Tensor) -> Tensor:
        """The token after `depth` [L] tokens that follow places [B, M]: [B, L, M]."""
        at = places.unsqueeze(1) + depth.unsqueeze(-1) + 1
        return self.text[at.clamp(max=len(self.text) - 1)].long()


def in_order(text: Tensor, places: Tensor, length: int) -> Tensor:
    """Places of a text in the order of the `length` tokens up to each, read backwards.

    Ranks of contexts are doubled in length until they suffice (Manber and Myers 1990), so that the
    work grows with the text's length times the logarithm of `length`.

    Args:
        text: [N] int64, at least -1.
        places: [M] int64.

    >>> in_order(torch.tensor([-1, 1, 2, -1, 1, 2, 3, 2]), torch.tensor([2, 5, 6, 7]), 2).tolist()
    [2, 5, 7, 6]
    """
    rank, known = torch.unique(text, return_inverse=True)[1], 1
    while known < length:
        before = torch.cat([rank.new_zeros(known), rank[:-known] + 1])
        rank = torch.unique(rank * (len(text) + 1) + before, return_inverse=True)[1]
        known *= 2
    return places[rank[places].argsort(stable=True)]
