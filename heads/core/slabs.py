"""The memory of a slab cache: one tensor for the keys and values of all layers that are alike.

An entry is the keys or the values of one layer. A slab has all entries of one device, dtype and
size, [entries, B, S, H, D]. Slot s of row b lies at flat index b * S + s in each of them.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .layer_shape import LayerShape

_made = itertools.count()  # memories, so far


class Slabs:
    """The slabs of a model's layers, in memory that all batch sizes share.

    Attributes:
        batch, capacity: B rows of S slots.
        contents: another object with each text or batch of texts.
    """

    def __init__(self, shapes: list[LayerShape], batch: int):
        self.shapes, self.batch, self.capacity = shapes, batch, 0
        # Of each slab, by device, dtype and sizes of its entries: (kind, layer).
        self._members: dict[tuple, list[tuple[int, int]]] = {}
        for layer, shape in enumerate(shapes):
            for kind, size in enumerate((shape.key, shape.value) if shape.attends else ()):
                group = (shape.device, shape.dtype, size)
                self._members.setdefault(group, []).append((kind, layer))
        order = list(itertools.chain(*self._members.values()))
        # The places of each layer's keys and values among all slabs' entries.
        self._entries = {
            i: (order.index((0, i)), order.index((1, i)))
            for i, shape in enumerate(shapes)
            if shape.attends
        }
        self._slabs: list[Tensor] = []
        self._memory: list[Tensor] = []  # of each slab, flat
        self._made, self.contents = next(_made), object()
        self._capacities: dict[int, int] = {}  # by batch, of the last request of so many rows

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` slots a row, keeping what is cached. Never shrinks."""
        if capacity > self.capacity:
            contents = self.contents
            self._shape(capacity, [slab.clone() for slab in self._slabs])
            self.contents = contents

    def take(self, other: Slabs, row: int, slots: int, into: int = 0) -> None:
        """Copy the first `slots` slots of a row of another cache into one of this."""
        self._hold(*other._members)
        for own, theirs in zip(self._slabs, other._slabs, strict=True):
            own[:, into, :slots] = theirs[:, row, :slots]

    def _hold(self, *groups: tuple) -> None:
        """Have slabs of these groups; that of features, the last one, is made when it is needed."""
        for group in groups:
            if group in self._members:
                continue
            device, dtype, (heads, size), _ = group
            if self._memory:
                shape = 1, self.batch, self.capacity, heads, size
                self._memory.append(torch.zeros(math.prod(shape), dtype=dtype, device=device))
                self._slabs.append(self._memory[-1].view(shape))
                self._made = next(_made)
                self._view()
            self._members[group] = [(2, 0)]

    def _shape(self, capacity: int, kept: list[Tensor]) -> None:
        """Have B rows of `capacity` slots, zeros but for the first slots, which are `kept`."""
        sizes = [
            (len(members), self.batch, capacity, heads, size)
            for (_, _, (heads, size), *_), members in self._members.items()
        ]
        counts = [math.prod(size) for size in sizes]
        have = [len(memory) for memory in self._memory] or [0] * len(counts)
        if any(count > had for count, had in zip(counts, have, strict=True)):
            self._give_back()  # before more is taken
            self._memory = [
                torch.empty(max(count, had), dtype=dtype, device=device)
                for count, had, (device, dtype, *_) in zip(counts, have, self._members, strict=True)
            ]
            self._made = next(_made)
        self._slabs = [
            memory[:count].view(size)  # [entries, B, S, H, D]
            for memory, count, size in zip(self._memory, counts, sizes, strict=True)
        ]
        self._clear_slots()
        for slab, old in zip(self._slabs, kept, strict=False):
            slab[:, :, : old.shape[2]] = old
        self.capacity = self._capacities[self.batch] = capacity
        self._view()

    def _view(self) -> None:
        """Look at the slabs in all the ways that are asked for."""
        self._rows = [slab.flatten(1, 2) for slab in self._slabs]  # [entries, B*S, H, D]
        self._heads = [slab.transpose(2, 3) for slab in self._slabs]  # [entries, B, H, S, D]
        self._flat = [view for slab in self._rows for view in slab.unbind(0)]
        self._full = self._views(0, self.capacity)
        firsts = torch.arange(self.batch, device=self.shapes[0].device) * self.capacity
        self._firsts = firsts.unsqueeze(1)  # [B, 1], the flat index of each row's first slot

    def _give_back(self) -> None:
        self.contents = object()  # also where no other memory can be had then
        self._slabs, self._memory, self.capacity = [], [], 0
        self._rows, self._heads, self._flat, self._full = [], [], [], []

    def _views(self, first: int, count: int) -> list[Tensor]:
        """Views of slots first … first + count - 1 of every entry, [B, H, count, D] each."""
        return [view for slab in self._heads for view in slab.narrow(3, first, count).unbind(0)]

    @property
    def _bytes_of_slot(self) -> int:
        return sum(
            len(members) * math.prod(size) * dtype.itemsize
            for (_, dtype, size, *_), members in self._members.items()
        )

    def _clear_slots(self) -> None:
        self.contents = object()
        for slab in self._slabs:
            slab.zero_()
