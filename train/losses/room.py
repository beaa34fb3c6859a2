"""Memory for what is as wide as the vocabulary: chunk after chunk, step after step uses it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Room:
    """Memory that is used again.

    A CPU's allocator returns large tensors to the system when they are freed, and the first write
    to a page of fresh memory takes several times as long as the write itself: a quarter of a step
    was that. Other devices' allocators keep what was freed themselves.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}
        self.lent: dict[int, tuple[Tensor, weakref.ref[np.ndarray]]] = {}

    def softmax(self, logits: Tensor, name: str) -> Tensor:
        """The probabilities of logits [n, Vd]; valid until the name is given again."""
        dtype = at_least_float32(logits)
        return torch.softmax(logits, -1, dtype=dtype, out=self.tensor(name, logits, dtype))

    def tensor(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room of the shape of `like`; valid until the name is given again."""
        return self.empty(name, like.shape, dtype, like.device)

    def empty(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room of a shape; valid until the name is given again."""
        size, kept = math.prod(shape), self.kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            self.kept.pop((name, dtype), None)  # let go first
            kept = torch.empty(size, dtype=dtype, device=device)
            self.kept[name, dtype] = kept
        return kept[:size].view(*shape)

    def lend(self, number: int, like: Tensor) -> Tensor:
        """An empty tensor of a kind, whose memory nothing else has, for those who will keep it.

        When it and all that shares its memory are gone, as a gradient is that an optimizer has set
        to None, the next tensor of this number gets the memory. Else that has memory of its own.
        """
        if like.device.type != "cpu":
            return torch.empty_like(like)
        size, kept = like.numel() * like.element_size(), None
        if number in self.lent:
            kept, borrowed = self.lent[number]
            if borrowed() is not None:
                return torch.empty_like(like)
        if kept is None or kept.numel() != size:
            kept = torch.empty(size, dtype=torch.uint8)
        array = kept.numpy()  # a new object, held by the storage of the tensor that is made of it
        self.lent[number] = kept, weakref.ref(array)
        return torch.from_numpy(array).view(like.dtype).view(like.shape)


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """The dtype that a distribution is computed in: the tensor's own, or float32 if that is more.

    >>> [at_least_float32(torch.empty(0, dtype=dtype)) for dtype in (torch.half, torch.double)]
    [torch.float32, torch.float64]
    """
    return torch.promote_types(tensor.dtype, torch.float32)
