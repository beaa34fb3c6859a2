"""States of drafters by row: those of texts are put into rows of a batch."""

from typing import Any

import torch
from torch import Tensor

from headstart.heads import SlabCache


def clear_caches(states: Any) -> None:
    """Empty the caches in states: what others left there may be NaN, which no mask hides."""
    if isinstance(states, list):
        for each in states:
            clear_caches(each)
    elif isinstance(states, SlabCache):
        states.clear()
    elif not isinstance(states, Tensor) and hasattr(states, "__dict__"):
        clear_caches(list(vars(states).values()))


def adopt_rows(own: Any, other: Any, rows: Tensor, slots: int, batch: int) -> None:
    """Put what states of drafters hold of new prompts into rows [R] of states of `batch` rows.

    Args:
        other: states that have seen their prompts, and no round yet: tensors and slab caches with a
            row for each text, as attributes, or attributes of those.
        slots: of caches that hold something.
    """
    if isinstance(other, list):
        for mine, theirs in zip(own, other, strict=True):
            adopt_rows(mine, theirs, rows, slots, batch)
        return
    for name, value in vars(other).items() if hasattr(other, "__dict__") else ():
        mine = getattr(own, name, None)
        if isinstance(value, SlabCache):
            assert mine is not None
            mine.adopt(value, rows, getattr(other, "prompt", None) or slots)
        elif isinstance(value, Tensor):
            setattr(own, name, _with_rows(mine, value, rows, batch))
        elif mine is not None:
            adopt_rows(mine, value, rows, slots, batch)


def _with_rows(own: Tensor | None, other: Tensor, rows: Tensor, batch: int) -> Tensor:
    """`own` [B, …] with rows [R] replaced; it is as wide as the wider of the two."""
    if own is None:
        own = other.new_zeros(batch, *other.shape[1:])
    if other.dim() == 1:
        return own.index_copy(0, rows, other)
    width = other.shape[1]
    if own.shape[1] < width:
        own = torch.cat([own, own.new_zeros(batch, width - own.shape[1], *own.shape[2:])], 1)
    own = own.clone()
    own[rows, :width] = other
    return own
