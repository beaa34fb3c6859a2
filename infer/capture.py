"""Captures work as CUDA graphs, and keeps alive what they read.

A graph repeats kernels on addresses. The memory that the work itself allocates is the graph's own
and stays as long as it does; what the work reads from outside is known by its address alone. Large
memory, weights and caches, has owners, and the address of what may move is part of the key that a
graph is found by. Small memory belongs to whoever needed it last: a request's processor, a tree's
shape, a state that the next capture replaces. `Borrowed` finds it and holds it with the graph.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]  # does work; returns what repeats it

_Found = TypeVar("_Found")

_SMALL = 1 << 20  # bytes of memory that is held with a graph, at most

_capturing = threading.Lock()
"""Held by the thread that captures: beginning a capture waits for the whole device, which makes
another thread's capture invalid."""

_streams: dict[tuple[torch.device, int], Any] = {}
"""The stream that captures on a device, by the one that it captures for. cuBLAS keeps memory for
each stream that it has computed on (32 MB on Hopper), which is never freed, so there are no more of
them than needed; graphs that may run at the same time, on streams of their own, share none."""

_unended: list[Any] = []
"""Graphs whose capture could not be ended: torch goes on asking them whether a stream that pinned
memory is taken for belongs to it."""


class _Watched(threading.local):
    """Whether a thread's borrowing is noted now."""

    def __init__(self) -> None:
        self.on = True


_watched = _Watched()


@contextmanager
def unwatched() -> Iterator[None]:
    """While this lasts, nothing is noted as borrowed: for what reads its owner's memory alone.

    Compiled code is run so. It allocates where no dispatch mode sees it, so that its own memory
    would count as borrowed.
    """
    before, _watched.on = _watched.on, False
    try:
        yield
    finally:
        _watched.on = before


class Borrowed(TorchDispatchMode):
    """Holds the small memory that work reads and did not make, from when it first reads it.

    Attributes:
        held: the storages, by address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, torch.UntypedStorage] = {}
        self._made: set[int] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that `torch.compile` compiles, and runs what it has compiled, all the same."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As `is_infra_mode`, in torch from 2.12 on."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _watched.on:
            return function(*args, **(kwargs or {}))
        for storage in _storages((args, tuple((kwargs or {}).values()))):
            place = storage.data_ptr()
            if place not in self._made and place not in self.held and storage.nbytes() <= _SMALL:
                self.held[place] = storage
        found = function(*args, **(kwargs or {}))
        # What is made is never where something is that was there before, since that is held.
        self._made.update(
            place
            for storage in _storages((found,))
            if (place := storage.data_ptr()) not in self.held
        )
        return found


def _storages(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    """Those of an operator's values, which stand alone or in lists."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


@dataclass(frozen=True)
class Captured(Generic[_Found]):
    """Work that can be repeated; calling it does so, and returns what the work returned.

    Attributes:
        replay: repeats it on the same addresses.
        result: what it returned, whose tensors a replay writes again.
        borrowed: see `Borrowed`.
    """

    replay: Callable[[], Any]
    result: _Found
    borrowed: dict[int, torch.UntypedStorage]

    @classmethod
    def by(cls, capture: Capture, work: Callable[[], _Found]) -> "Captured[_Found]":
        """Do the work, and capture it meanwhile."""
        found: list[_Found] = []
        borrowed = Borrowed()

        def watched() -> _Found:
            with borrowed:
                found.append(work())
            return found[-1]

        replay = capture(watched)
        return cls(replay, found[0], borrowed.held)

    def __call__(self) -> _Found:
        self.replay()
        return self.result


class _Begins:
    """A CUDA graph, of which `torch.cuda.graph` begins and ends the capture.

    A capture takes the state of the device's random numbers, and until it ends torch (before 2.13)
    raises an error in every thread that draws some, as plain `generate` does when it samples. What
    is captured here draws none, so the capture is given a state of its own.
    """

    def __init__(self, graph: Any, device: torch.device):
        self._graph, self._generator = graph, torch.cuda.default_generators[device.index]

    def capture_begin(self, *given: Any, **options: Any) -> None:
        shared = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._generator.clone_state())
        try:
            self._graph.capture_begin(*given, **options)
        finally:
            self._generator.graphsafe_set_state(shared)

    def capture_end(self) -> None:
        self._graph.capture_end()


class CudaCapture:
    """Captures work on a device as CUDA graphs that share one pool of memory, as they run one by
    one. Work that draws torch's own random numbers cannot be captured.

    Where that fails, the thread's stream and the allocator are as before, and what is raised is the
    cause, not that the capture was invalid.
    """

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", torch.cuda.current_device())
        if device.index is not None:
            self._device = device
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        causes: list[BaseException] = []

        def noted() -> None:
            try:
                work()
            except BaseException as cause:
                causes.append(cause)
                raise

        with torch.cuda.device(self._device), _capturing:
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    self._restored(graph),
                    torch.cuda.graph(
                        cast(Any, _Begins(graph, self._device)),
                        pool=self._pool,
                        stream=_capture_stream(self._device),
                        capture_error_mode="thread_local",
                    ),
                ):
                    noted()
            except Exception:
                if causes:  # the end of an invalid capture raises an error of its own
                    raise causes[0] from None
                raise
            graph.replay()
        return graph.replay

    @contextmanager
    def _restored(self, graph: Any) -> Iterator[None]:
        """After an error: what a capture changed that could not be ended."""
        stream, index = torch.cuda.current_stream(self._device), self._device.index
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # it says so where the capture could be ended
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
                _unended.append(graph)
            self._pool = torch.cuda.graph_pool_handle()  # the old one may be half filled
            raise


def _capture_stream(device: torch.device) -> Any:
    """The stream on which work of a device's current stream is captured."""
    current = torch.cuda.current_stream(device).cuda_stream
    if (device, current) not in _streams:
        _streams[device, current] = torch.cuda.Stream(device)
    return _streams[device, current]


def capture_on(device: torch.device) -> Capture | None:
    """As the device allows: CUDA graphs, or None."""
    return CudaCapture(device) if device.type == "cuda" else None
