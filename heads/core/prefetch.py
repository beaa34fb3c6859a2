"""Weights on their way to a GPU while the layer before them computes.

accelerate's hooks fetch each weight when its layer is called: from memory that is not pinned, so
that the GPU waits for every copy, or from a disk. Here the weights of a decoder layer lie side by
side in pinned memory, and one copy, on a stream of its own, brings the next layer's while this one
computes. Two buffers on the GPU take turns:

    copies     | layer 0 -> A | layer 1 -> B | waits | layer 2 -> A | …
    computes                  | layer 0 in A         | layer 1 in B | …

A layer waits for the event behind its copy, and a copy for the event behind the layer that last
read its buffer; the host waits for neither. The last layer's copy is followed by the first one's,
for the next forward. All memory is held as long as this is, so an allocator never gives it away
beneath a copy.

Layers in CPU memory stay in pinned memory. Layers on disk share two blocks of it, which a thread
reads them into ahead of their copies, see `ReadAhead`. The host waits for a layer that is not read
yet when it is called, and no earlier.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from transformers import PreTrainedModel

from .features import decoder_layers
from .offload import device_of, offloaded, set_fetching
from .read_ahead import ReadAhead
from .weight_sources import InMemory, OpenFiles, Source, sources_of

_Found = TypeVar("_Found")

_ALIGNED = 256  # bytes that a weight begins at a multiple of
_TOGETHER = 8  # layers, each rounded up, of which a block holds so many at least if there are more

_known: "weakref.WeakKeyDictionary[nn.Module, Prefetch]" = weakref.WeakKeyDictionary()
_locks: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_making = threading.Lock()


def run_streamed(model: PreTrainedModel, forward: Callable[[], _Found]) -> _Found:
    """What a forward of a model returns whose weights are streamed in, ahead of it where possible.

    One thread at a time: the modules hold a forward's weights, and lose them when it ends.
    """
    with alone(model):
        ahead = Prefetch.of(model)
        with ahead or nullcontext():
            return forward()


def alone(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """While this lasts, no other thread runs a model whose weights are streamed in."""
    if not offloaded(model):
        return nullcontext()
    with _making:
        return _locks.setdefault(model, threading.RLock())


class CopyStream:
    """Copies to a GPU beside what it computes, in order with it by events."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.Stream(device)

    def host_memory(self, size: int) -> Tensor:
        """So many bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, size: int) -> Tensor:
        """So many bytes on the GPU, which nobody else gets while a copy to them is on its way."""
        found = torch.empty(size, dtype=torch.uint8, device=self.device)
        found.record_stream(self._stream)
        return found

    def copy(self, to: Tensor, source: Tensor, after: Any) -> Any:
        """Start a copy once the event `after` was reached; the event behind it."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Have what is computed from now on wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> Any:
        """The event behind what is to be computed up to now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def reached(self, event: Any) -> None:
        """Have the host's thread wait for an event."""
        event.synchronize()


class _Layer:
    """A decoder layer whose weights are streamed in.

    Args:
        parts: its modules with such weights, and where each comes from.

    Attributes:
        size: bytes of its weights; host: where they stay, if they do.
    """

    def __init__(self, parts: list[tuple[nn.Module, dict[str, Source]]]):
        self._modules, self.size, self.host = [module for module, _ in parts], 0, torch.empty(0)
        self._places: list[tuple[nn.Module, str, int, Source, Tensor]] = []
        found = [(module, name, s) for module, sources in parts for name, s in sources.items()]
        for module, name, source in sorted(found, key=lambda each: each[2].place):
            none = torch.empty_like(source.like, device="meta")
            self._places.append((module, name, self.size, source, none))
            self.size += -(-none.nbytes // _ALIGNED) * _ALIGNED

    @property
    def on_disk(self) -> bool:
        """Whether any weight is."""
        return not all(isinstance(source, InMemory) for *_, source, _ in self._places)

    @property
    def attached(self) -> bool:
        """Whether accelerate's hooks are there still, with the weights that were found."""
        return all(map(has_offloaded_params, self._modules)) and all(
            source.attached for *_, source, _ in self._places
        )

    def move_to(self, host: Tensor) -> None:
        """Put the weights into memory [size], in bytes; hooks find them there as well."""
        self.host = host
        for _, _, first, source, like in self._places:
            assert isinstance(source, InMemory)
            source.move(_view(host, first, like))

    def read(self, memory: Tensor) -> None:
        """Write the weights to memory of at least `size` bytes."""
        with OpenFiles() as files:
            for _, _, first, source, like in self._places:
                source.read(_view(memory, first, like), files)

    def place(self, memory: Tensor) -> None:
        """Let the modules compute with the weights in a buffer."""
        for module, name, first, _, like in self._places:
            module._parameters[name] = nn.Parameter(_view(memory, first, like), False)

    def take_away(self) -> None:
        """Let the modules have no weights again."""
        for module, name, _, _, like in self._places:
            module._parameters[name] = nn.Parameter(like, False)

    def fetching(self, on: bool) -> None:
        """Whether accelerate's hooks fetch the weights."""
        for module in self._modules:
            set_fetching(module, on)


def _view(memory: Tensor, first: int, like: Tensor) -> Tensor:
    return memory[first : first + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True)
class _Brought:
    """A layer's weights, there or on their way.

    Attributes:
        layer: its number; memory: what it computes with.
        buffer: the number of the buffer on the GPU; event: behind the copy to it.
    """

    layer: int
    memory: Tensor
    buffer: int
    event: Any


class Prefetch(AbstractContextManager):
    """While this lasts, decoder layers find their weights on the device, brought ahead of them.

    For one thread at a time, see `run_streamed`.

    Args:
        model: with accelerate's hooks; its weights in CPU memory are moved to pinned memory.

    Attributes:
        layers: how many are brought ahead; size: bytes of all that a forward brings.
        on_disk: how many of them are read from files.
    """

    def __init__(self, model: PreTrainedModel, stream: CopyStream):
        self._stream, self._thread = stream, None
        self._coming: _Brought | None = None
        self._now: _Brought | None = None  # what the layer that computes has
        self._last = 0  # the buffer that a layer had last
        self._layers = [
            (module, found)
            for module in decoder_layers(model)
            if (found := streamed_layer(module)) is not None
        ]
        self.layers, self.size = len(self._layers), sum(layer.size for _, layer in self._layers)
        kept = [layer for _, layer in self._layers if not layer.on_disk]
        host = side_by_side([layer.size for layer in kept], stream.host_memory)
        for layer, memory in zip(kept, host, strict=True):
            layer.move_to(memory)
        for number, (module, _) in enumerate(self._layers):
            module.register_forward_pre_hook(partial(_before, weakref.ref(self), number))
            module.register_forward_hook(partial(_after, weakref.ref(self), number))
        most = max((layer.size for _, layer in self._layers), default=0)
        self._buffers = [stream.device_memory(most) for _ in range(2)]
        # The event behind the layer that read each buffer; at first, behind who had its memory.
        self._read: list[Any] = [stream.mark()] * 2
        from_disk = [number for number, (_, layer) in enumerate(self._layers) if layer.on_disk]
        self._part = {number: part for part, number in enumerate(from_disk)}  # of `_ahead`
        self.on_disk = len(from_disk)
        self._ahead = _read_ahead([self._layers[number][1] for number in from_disk], stream)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """The one of a model; None where nothing of it is to be brought ahead."""
        device = device_of(model)
        if not offloaded(model) or device.type != "cuda":
            return None
        found: Any = _known.get(model)
        if found is None or not found.layers or not found.attached:
            with torch.inference_mode(False):  # later forwards and threads write to its memory
                found = _known[model] = cls(model, CopyStream(device))
        return found if found.layers else None

    @property
    def attached(self) -> bool:
        """Whether the layers have their hooks still, and not been loaded or moved meanwhile."""
        return all(layer.attached for _, layer in self._layers)

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for _, layer in self._layers:
            layer.fetching(False)
        self._ahead.begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._thread = None
        self._end()  # of a layer that raised an error
        for _, layer in self._layers:
            layer.fetching(True)
            layer.take_away()

    def before(self, number: int) -> None:
        """A layer is about to compute."""
        if self._thread != threading.get_ident():
            return
        coming, self._coming = self._coming, None
        if coming is None or coming.layer != number:  # not read before, or after an error
            coming = self._bring(number)
        self._stream.wait(coming.event)
        self._layers[number][1].place(coming.memory)
        self._now, self._last = coming, coming.buffer
        following = (number + 1) % self.layers
        part = self._part.get(following)
        if part is None or self._ahead.ready(part):
            self._coming = self._bring(following)

    def after(self, number: int) -> None:
        """A layer has been told to compute."""
        if self._thread == threading.get_ident():
            self._layers[number][1].take_away()
            self._end()

    def _end(self) -> None:
        found, self._now = self._now, None
        if found is not None:
            self._read[found.buffer] = self._stream.mark()

    def _bring(self, number: int) -> _Brought:
        """Start to copy a layer's weights to the buffer that no layer computes with."""
        layer, part, event = self._layers[number][1], self._part.get(number), None
        host = layer.host if part is None else self._ahead.take(part)
        buffer = 1 - self._last
        to = self._buffers[buffer][: layer.size]
        try:
            event = self._stream.copy(to, host[: layer.size], self._read[buffer])
        finally:
            if part is not None:
                self._ahead.give_back(host, event)
        return _Brought(number, to, buffer, event)


def side_by_side(sizes: list[int], memory: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """Memory of so many bytes each, cut from blocks of a power of two, which are made one by one.

    torch rounds pinned memory up to a power of two, so layers of 0.6 GB in a block each would take
    nearly twice their size.

    Args:
        memory: makes a block.

    >>> [len(found) for found in side_by_side([5, 5, 5, 3], lambda size: torch.empty(size))]
    [5, 5, 5, 3]
    """
    while sizes:
        one, rest = 1 << (sizes[0] - 1).bit_length(), 1 << sum(sizes).bit_length() - 1
        # Few enough that what is moved is never in memory twice for the most part.
        block = memory(max(one, min(rest, _TOGETHER * one)))
        while sizes and sizes[0] <= len(block):
            yield block[: sizes[0]]
            block, sizes = block[sizes[0] :], sizes[1:]


def _read_ahead(layers: list[_Layer], stream: CopyStream) -> ReadAhead:
    most = max((layer.size for layer in layers), default=0)
    blocks = [stream.host_memory(most) for _ in range(2 if layers else 0)]
    return ReadAhead([layer.read for layer in layers], blocks, stream.reached)


def _before(owner: "weakref.ref[Prefetch]", number: int, module: nn.Module, args: Any) -> None:
    if (found := owner()) is not None:
        found.before(number)


def _after(
    owner: "weakref.ref[Prefetch]", number: int, module: nn.Module, args: Any, output: Any
) -> None:
    if (found := owner()) is not None:
        found.after(number)


def streamed_layer(layer: nn.Module) -> _Layer | None:
    """A layer as it is streamed in; None for one that is not, or not in a way known here."""
    parts = []
    for module in filter(has_offloaded_params, layer.modules()):
        if (sources := sources_of(module)) is None:
            return None
        parts.append((module, sources))
    return _Layer(parts) if parts else None
