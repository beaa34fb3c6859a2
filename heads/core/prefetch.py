"""Weights in CPU memory on their way to a GPU while the layer before them computes.

accelerate's hooks fetch each weight when its layer is called, from memory that is not pinned, so
the GPU waits for every copy. Here the weights of a decoder layer lie side by side in pinned memory,
and one copy, on a stream of its own, brings the next layer's while this one computes. Two buffers
on the GPU take turns:

    copies     | layer 0 -> A | layer 1 -> B | waits | layer 2 -> A | …
    computes                  | layer 0 in A         | layer 1 in B | …

A layer waits for the event behind its copy, and a copy for the event behind the layer that last
read its buffer; the host waits for neither. The last layer's copy is followed by the first one's,
for the next forward. All memory is held as long as this is, so an allocator never gives it away
beneath a copy.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self, TypeVar

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from transformers import PreTrainedModel

from .features import decoder_layers
from .offload import device_of, offloaded

_Found = TypeVar("_Found")

_ALIGNED = 256  # bytes that a weight begins at a multiple of

_known: "weakref.WeakKeyDictionary[nn.Module, Prefetch]" = weakref.WeakKeyDictionary()


class CopyStream:
    """Copies to a GPU beside what it computes, in order with it by events."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.Stream(device)

    def host_memory(self, size: int) -> Tensor:
        """So many bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: Tensor, source: Tensor, after: Any) -> Any:
        """Start a copy once the event `after` was reached (None: at once); the event behind it."""
        with torch.cuda.stream(self._stream):
            if after is not None:
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


class _Layer:
    """A decoder layer whose weights are in CPU memory.

    Args:
        parts: its modules with such weights, and where accelerate's hooks look for each weight.
    """

    def __init__(self, parts: list[tuple[nn.Module, dict[str, tuple[Any, str]]]]):
        self.parts, self.size = parts, 0
        self._places: list[tuple[nn.Module, str, int, Tensor]] = []
        for module, weights in parts:
            for name, (kept, key) in weights.items():
                self._places.append((module, name, self.size, kept[key]))
                self.size += -(-kept[key].nbytes // _ALIGNED) * _ALIGNED
        self.host = torch.empty(0)

    def move_to(self, host: Tensor) -> None:
        """Put the weights into memory [size], in bytes; hooks find them there as well."""
        self.host, found = host, iter(self._places)
        self._given = list[list[tuple[Any, str, Tensor]]]()
        for _, weights in self.parts:
            self._given.append([])
            for kept, key in weights.values():
                _, _, first, weight = next(found)
                own = _view(host, first, weight)
                own.copy_(weight)
                kept[key] = own
                self._given[-1].append((kept, key, own))
        self._places = [(m, name, at, _like(weight)) for m, name, at, weight in self._places]

    def place(self, memory: Tensor) -> None:
        """Let the modules compute with the weights in a buffer, and their hooks fetch none."""
        for module, name, first, weight in self._places:
            module._parameters[name] = nn.Parameter(_view(memory, first, weight), False)

    def take_away(self) -> None:
        """Let the modules have no weights again."""
        for module, name, _, weight in self._places:
            module._parameters[name] = nn.Parameter(weight, False)

    @property
    def attached(self) -> bool:
        """Whether accelerate's hooks are there still, with the weights that were found."""
        return all(
            has_offloaded_params(module) and all(kept.get(key) is own for kept, key, own in given)
            for (module, _), given in zip(self.parts, self._given, strict=True)
        )

    def hooks(self, fetch: bool) -> None:
        """Whether accelerate's hooks fetch the weights."""
        for module, _ in self.parts:
            module._hf_hook.offload = fetch  # type: ignore[union-attr]


def _view(memory: Tensor, first: int, weight: Tensor) -> Tensor:
    return memory[first : first + weight.nbytes].view(weight.dtype).view(weight.shape)


def _like(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, device="meta")


class Prefetch(AbstractContextManager):
    """While this lasts, decoder layers find their weights on the device, copied ahead of them.

    For one thread at a time; others wait. Layers that have weights on disk are left to accelerate.

    Args:
        model: with accelerate's hooks; its weights in CPU memory are moved to pinned memory.

    Attributes:
        layers: how many are copied ahead; size: bytes of all that a forward copies.
    """

    def __init__(self, model: PreTrainedModel, stream: CopyStream):
        self._stream, self._lock, self._depth = stream, threading.RLock(), 0
        self._thread: int | None = None
        self._read: list[Any] = [None, None]  # the event behind the layer that read each buffer
        self._coming: tuple[int, int, Any] | None = None  # layer, buffer, the event of its copy
        self._now = 0  # the buffer of the layer that computes, or did last
        self._computing = False
        self._layers = [
            (module, found)
            for module in decoder_layers(model)
            if (found := _in_memory(module)) is not None
        ]
        self.layers, self.size = len(self._layers), sum(layer.size for _, layer in self._layers)
        if not self._layers:
            return
        for number, (module, layer) in enumerate(self._layers):
            layer.move_to(stream.host_memory(layer.size))
            module.register_forward_pre_hook(partial(_before, weakref.ref(self), number))
            module.register_forward_hook(partial(_after, weakref.ref(self), number))
        most = max(layer.size for _, layer in self._layers)
        self._buffers = [
            torch.empty(most, dtype=torch.uint8, device=stream.device) for _ in range(2)
        ]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """The one of a model; None where nothing of it is to be copied to a GPU."""
        if not offloaded(model) or device_of(model).type != "cuda":
            return None
        found: Any = _known.get(model)
        if found is None or not found.layers or not found.attached:
            found = _known[model] = cls(model, CopyStream(device_of(model)))
        return found if found.layers else None

    @property
    def attached(self) -> bool:
        """Whether the layers have their hooks still, and not been loaded or moved meanwhile."""
        return all(layer.attached for _, layer in self._layers)

    def run(self, forward: Callable[[], _Found]) -> _Found:
        """What a forward of the model returns, with weights that are copied ahead."""
        with self:
            return forward()

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        self._thread = threading.get_ident()
        for _, layer in self._layers if self._depth == 1 else ():
            layer.hooks(fetch=False)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = None
            self._end()  # of a layer that raised an error
            for _, layer in self._layers:
                layer.hooks(fetch=True)
                layer.take_away()
        self._lock.release()

    def before(self, number: int) -> None:
        """A layer is about to compute."""
        if self._thread != threading.get_ident():
            return
        coming = self._coming
        if coming is None or coming[0] != number:  # the first forward, or one after an error
            coming = self._copy(number)
        _, buffer, event = coming
        self._stream.wait(event)
        self._layers[number][1].place(self._buffers[buffer])
        self._now, self._computing = buffer, True
        self._coming = self._copy((number + 1) % len(self._layers))

    def after(self, number: int) -> None:
        """A layer has been told to compute."""
        if self._thread == threading.get_ident():
            self._layers[number][1].take_away()
            self._end()

    def _end(self) -> None:
        if self._computing:
            self._read[self._now], self._computing = self._stream.mark(), False

    def _copy(self, number: int) -> tuple[int, int, Any]:
        """Start a layer's copy to the buffer that no layer computes with."""
        layer, buffer = self._layers[number][1], 1 - self._now
        to = self._buffers[buffer][: layer.size]
        return number, buffer, self._stream.copy(to, layer.host, self._read[buffer])


def _before(owner: "weakref.ref[Prefetch]", number: int, module: nn.Module, args: Any) -> None:
    if (found := owner()) is not None:
        found.before(number)


def _after(
    owner: "weakref.ref[Prefetch]", number: int, module: nn.Module, args: Any, output: Any
) -> None:
    if (found := owner()) is not None:
        found.after(number)


def _in_memory(layer: nn.Module) -> _Layer | None:
    """A layer whose weights that are streamed are all in CPU memory; None for another one."""
    parts = []
    for module in layer.modules():
        if not has_offloaded_params(module):
            continue
        hook: Any = module._hf_hook
        places = dict(_places(hook.weights_map, module))
        plain = all(kept is not None for kept, _ in places.values())
        if not plain or hook.tied_params_names or hook.offload_buffers:
            return None
        parts.append((module, places))
    return _Layer(parts) if parts else None


def _places(kept: Any, module: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Where each weight of a module is in CPU memory, as a dictionary and a key; None if not."""
    prefix = ""
    if hasattr(kept, "prefix"):
        kept, prefix = kept.dataset, kept.prefix
    in_memory: Any = getattr(kept, "state_dict", kept)
    for name, _ in module.named_parameters(recurse=False):
        key = f"{prefix}{name}"
        found = isinstance(in_memory, Mapping) and key in in_memory
        plain = found and type(in_memory[key]) in (Tensor, nn.Parameter)
        yield name, (in_memory if plain else None, key)
