"""Packing: short rows stand behind each other in one, so that little of a batch is padding."""

from __future__ import annotations

import numpy as np

from .prefixes import DistillError


class Packs:
    """Rows packed into rows of at most `room` tokens, by best fit.

    Rows are taken from the longest to the shortest, each into the pack with the least room that
    still takes it (best-fit decreasing). What goes with what thus depends on the lengths alone, and
    is the same in every epoch; which of the rows of a length it is, is drawn anew.

    Args:
        lengths: [n], tokens of each row.
        room: of a pack; by default as many tokens as the longest row has. DistillError where that
            row does not fit.

    Attributes:
        sizes: [packs], tokens of each pack.
    """

    def __init__(self, lengths: np.ndarray, room: int | None = None):
        longest = int(lengths.max())
        room = longest if room is None else room
        if longest > room:
            raise DistillError(
                f"train.packed_length is {room}, but the longest row has {longest} tokens; raise it"
                ", or set it to null, or lower distill.max_length."
            )
        self.lengths = lengths
        packs = best_fit(np.sort(lengths)[::-1], room)
        self.sizes = np.bincount(packs, weights=np.sort(lengths)[::-1]).astype(np.int64)
        self._slots = np.argsort(packs, kind="stable")  # places in the sorted order, by pack
        self._ends = np.cumsum(np.bincount(packs))[:-1]

    def rows(self, draw: np.random.Generator) -> list[list[int]]:
        """The row numbers of each pack."""
        order = draw.permutation(len(self.lengths))
        order = order[np.argsort(-self.lengths[order], kind="stable")]
        return [part.tolist() for part in np.split(order[self._slots], self._ends)]


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """For each length, in this order, the pack that it goes to.  # [n]

    >>> best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist()
    [0, 1, 0, 1, 1]
    """
    packs, count = np.empty(len(lengths), np.int64), 0
    open_packs: dict[int, list[int]] = {}  # by the room that they have left
    left_by_packs = 0  # bit r is set where a pack has room r left
    for place, length in enumerate(lengths.tolist()):
        fitting = left_by_packs >> length
        if fitting:
            found = length + (fitting & -fitting).bit_length() - 1  # the least room
            pack = open_packs[found].pop()
            if not open_packs[found]:
                left_by_packs ^= 1 << found
        else:
            found, pack, count = room, count, count + 1
        packs[place] = pack
        left = found - length
        if left:
            open_packs.setdefault(left, []).append(pack)
            left_by_packs |= 1 << left
    return packs
