"""A slab cache: all layers' keys and values in one tensor, written at per-row positions.

One index tensor serves every layer, whether the rows have the same length or not, and the accepted
path is moved by one gather for all layers. The tensors themselves are in `slabs`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from . import cpu_kernels
from .fused import fused_writes
from .fused_writes import write
from .layer_shape import LayerShape
from .recurrent import RecurrentLayer, RecurrentShape, RecurrentStates
from .slabs import Slabs
from .triton_here import no_kernel

SLOT_STEP = 64
"""Slots grow, and are attended to, in steps of this size, so shapes seldom change."""


def in_steps(slots: int) -> int:
    """So many slots, rounded up to whole steps of `SLOT_STEP`."""
    return -(-slots // SLOT_STEP) * SLOT_STEP


def plain_move(rows: Tensor, slots: Tensor, path: Tensor) -> None:
    """Move entries of nodes `path` to the first A nodes' slots; all is read before it is written.

    Args:
        rows: [entries, B*S, H, D], changed in place.
        slots: [B, N] int64, the flat index of each node's slot.
        path: [B, A] int64.
    """
    source, destination = slots.gather(1, path), slots[:, : path.shape[1]]  # [B, A]
    rows.index_copy_(1, destination.flatten(), rows.index_select(1, source.flatten()))


class _Layer(CacheLayerMixin):
    """What models ask of a single layer; the tensors live in the slab."""

    is_sliding = False

    def __init__(self, cache: SlabCache):
        CacheLayerMixin.__init__(self)
        self.cache, self.is_initialized = cache, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise NotImplementedError("SlabCache.update writes the slab itself.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.live, 0

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_max_length(self) -> int:
        return self.cache.capacity


class _AttentionAndState(RecurrentLayer, _Layer):
    """What models ask of a layer that attends and is recurrent."""

    def __init__(self, cache: SlabCache, shape: RecurrentShape):
        _Layer.__init__(self, cache)
        RecurrentLayer.__init__(self, shape)


class SlabCache(Slabs, Cache):
    """Slabs with which any model of transformers runs as its cache, after `set_slots`.

    Attributes:
        live: slots of each row that the next forward attends to.
        seen: what `get_seq_length` reports, for forwards without an explicit mask.
    """

    def __init__(self, shapes: list[LayerShape], batch: int, capacity: int):
        recurrent = {
            number: _AttentionAndState(self, state) if shape.attends else RecurrentLayer(state)
            for number, shape in enumerate(shapes)
            if (state := shape.recurrent) is not None
        }
        Cache.__init__(self, layers=[recurrent.get(i) or _Layer(self) for i in range(len(shapes))])
        self.recurrent = RecurrentStates(recurrent) if recurrent else None
        Slabs.__init__(self, shapes, batch)
        self.dtype = shapes[0].dtype  # which attention masks take
        self.devices = {shape.device for shape in shapes}
        self.live = self.seen = 0
        self._flat_slots: Tensor | range = range(0)  # [B, N] flat indices, or a range in all rows
        self._slots: dict[torch.device, Tensor] = {}  # the same flattened, for each device
        self._written: list[Tensor] | None = None  # views of the slots, where they are a range
        if self.recurrent is not None:
            self.recurrent.resize(batch)
        self.reserve(capacity)

    def resize(self, batch: int, capacity: int) -> None:
        """Hold nothing, in `batch` rows of at least `capacity` slots.

        All sizes share one memory, as large as the largest of them, and `batch` rows have the slots
        that so many rows had before, so that what was captured with them stays good.
        """
        if self.recurrent is not None:
            self.recurrent.resize(batch)
        if batch != self.batch or capacity > self.capacity:
            self.batch, self.live = batch, 0
            self._shape(max(capacity, self._capacities.get(batch, 0)), [])
        else:
            self._clear_slots()

    def like(self, batch: int, capacity: int) -> SlabCache:
        """Another cache for the same."""
        found = SlabCache(self.shapes, batch, 0)
        found._members = self._members.copy()
        found.reserve(capacity)
        return found

    def put_features(self, features: Tensor) -> None:
        """Hold features [B, N, F], too: of the last forward's tokens, in the slots that it wrote.

        From then on they are kept, moved and copied as keys and values are.
        """
        # The last entry sets it apart from the slabs of layers.
        self._hold((features.device, features.dtype, (1, features.shape[-1]), "features"))
        slots = self._flat_slots
        if isinstance(slots, range):
            self._slabs[-1][0, :, slots.start : slots.stop, 0] = features
        else:
            rows = self._rows[-1][0, :, 0]  # [B*S, F]
            rows.index_copy_(0, slots.flatten().to(rows.device), features.flatten(0, 1))

    def features(self, slots: int) -> Tensor:
        """Those in the first `slots` slots of each row [B, slots, F]."""
        return self._slabs[-1][0, :, :slots, 0]

    def keep(self, slots: int, capacity: int) -> None:
        """Hold nothing but the first `slots` slots of each row, for another text that begins alike.

        There is space for at least `capacity` slots then. Recurrent layers keep no such part.
        """
        assert self.recurrent is None
        self.reserve(capacity)
        self.contents = object()
        for slab in self._slabs:
            slab[:, :, slots:].zero_()

    def release(self) -> None:
        """Give the memory back; there is none until `resize` takes some again."""
        self._give_back()
        self._capacities.clear()
        if self.recurrent is not None:
            self.recurrent.release()

    def _give_back(self) -> None:
        super()._give_back()
        self._written = None  # these views hold the memory

    @property
    def address(self) -> tuple[int, ...]:
        """The slabs' shape and a number of their memory, which is never another memory's.

        The memory's own address might be, once it has been given back.
        """
        states = 0 if self.recurrent is None else self.recurrent.made
        return self.batch, self.capacity, self._made, states

    def bytes_of(self, batch: int, capacity: int) -> int:
        """How much memory so many rows of so many slots take."""
        states = 0 if self.recurrent is None else self.recurrent.bytes_of_row
        return batch * (capacity * self._bytes_of_slot + states)

    def clear(self) -> None:
        """Overwrite all with zeros: masked slots count as zero times what they hold, a NaN too."""
        self._clear_slots()
        if self.recurrent is not None:
            self.recurrent.clear()

    def adopt(self, other: SlabCache, rows: Tensor, slots: int) -> None:
        """Copy the first `slots` slots of another cache's rows into `rows` [R] of this one."""
        self.reserve(slots)
        self._hold(*other._members)
        self.contents = object()
        for own, theirs in zip(self._slabs, other._slabs, strict=True):
            own.narrow(2, 0, slots).index_copy_(1, rows.to(own.device), theirs.narrow(2, 0, slots))
        if self.recurrent is not None and other.recurrent is not None:
            self.recurrent.adopt(other.recurrent, rows)

    def set_slots(self, slots: Tensor | range, live: int, seen: int = 0) -> None:
        """Let the next forward write `slots`, and attend to slots 0 … live - 1 of each row.

        Args:
            slots: [B, N] int64, or the range of slots that every row writes.
        """
        self.live, self.seen, self._written = live, seen, None
        if isinstance(slots, range):
            self._flat_slots = slots
            return
        self._flat_slots = slots + self._firsts if self.batch > 1 else slots  # [B, N]
        flat = self._flat_slots.flatten()
        self._slots = {device: flat.to(device) for device in self.devices}
        if (writes := fused_writes()) is not None:
            writes.cache = self

    def place_of(
        self, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the next forward writes a layer's [B, H, N, D] key and [B, N, H * D] value.

        Keys and values [B * S, H, D], and their rows [B * N]; None where these do not fit there.
        """
        if self._written is not None or layer not in self._entries:
            return None
        shape, slots = self.shapes[layer], self._slots[self.shapes[layer].device]
        batch, heads, nodes, size = key.shape
        fits = (heads, size) == shape.key and value.shape == (batch, nodes, math.prod(shape.value))
        alike = all(
            (each.device, each.dtype) == (shape.device, shape.dtype) for each in (key, value)
        )
        if not (fits and alike and heads == shape.value[0] and len(slots) == batch * nodes):
            return None
        keys, values = (self._flat[entry] for entry in self._entries[layer])
        return keys, values, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, N, D] keys and values at the set slots; return views [B, H, live, D]."""
        key, value = self._entries[layer_idx]
        if isinstance(self._flat_slots, range):
            if self._written is None:
                self._written = self._views(self._flat_slots.start, len(self._flat_slots))
            self._written[key].copy_(key_states)
            self._written[value].copy_(value_states)
        elif (writes := fused_writes()) is not None:
            slots = self._slots[key_states.device]
            if not writes.are_done(layer_idx, key_states, value_states):
                write(self._flat[key], self._flat[value], slots, key_states, value_states)
        elif self.batch == 1:
            # Flat indices are slots: write along them, without flattening the states.
            slots = self._slots[key_states.device]
            self._full[key].index_copy_(2, slots, key_states)
            self._full[value].index_copy_(2, slots, value_states)
        else:
            slots = self._slots[key_states.device]
            keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
            self._flat[key].index_copy_(0, slots, keys.flatten(0, 1))
            self._flat[value].index_copy_(0, slots, values.flatten(0, 1))
        return self._live(key), self._live(value)

    def _live(self, entry: int) -> Tensor:
        """What the next forward attends to of an entry, [B, H, live, D]."""
        return self._full[entry].narrow(2, 0, self.live)

    def places(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """What `update` returns, and where it writes: by whom both is done in another way.

        Returns:
            Keys and values [B, H, live, D]; the set slots [B * N] as flat indices, or None where
            all rows write the slots from the last value on.
        """
        key, value = (self._live(entry) for entry in self._entries[layer_idx])
        given = self._flat_slots
        if isinstance(given, range):
            return key, value, None, given.start
        return key, value, self._slots[key.device], 0

    def commit(self, path: Tensor, kernels: bool = False, in_place: bool = False) -> None:
        """Keep what the last forward cached of a tree's `path` [B, A], nodes from the root on.

        Its keys and values are moved to the first A slots, in order, unless they lie there already,
        `in_place`. States are those after the path's last node, which all entries behind it repeat.
        One `plain_move` for all layers of a slab; on CUDA one launch, where triton is.

        Args:
            kernels: whether the kernels for CPUs may do it.
        """
        if self.recurrent is not None:
            self.recurrent.commit(path[:, -1])
        slots = self._flat_slots
        for rows in self._rows if not in_place else ():  # [entries, B*S, H, D]
            if kernels and cpu_kernels.move_path(rows, slots, path):
                continue
            if isinstance(slots, range):
                numbers = torch.arange(slots.start, slots.stop, device=self._firsts.device)
                slots = self._firsts + numbers
            move = plain_move
            if no_kernel(rows.device) is None:
                from .kernels import move_path as move
            move(rows, slots.to(rows.device), path.to(rows.device))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [B, H, S, D] each, all slots (for tests and tools)."""
        key, value = self._entries[index]
        return self._full[key], self._full[value]
