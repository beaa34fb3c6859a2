"""Work captured once and replayed: on a GPU a whole round of decoding is one CUDA graph.

A graph repeats the same kernels on the same addresses and runs no Python. So what one round hands
to the next lies in tensors that stay (`RoundGraphs.keep`), what the host decides is the graph's
`kind`, and everything else is read on the device. The first round of a kind runs as written, which
warms everything up; the second is captured; all later ones are replayed.

Example: lengths that grow by one a round, repeated at the address where they lie.

>>> graphs = RoundGraphs()
>>> lengths = graphs.keep("lengths", torch.tensor([3, 5]))
>>> for _ in range(3):
...     lengths = graphs.run("grow", lambda: graphs.keep("lengths", lengths + 1))
>>> lengths.tolist()
[6, 8]
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import DrafterGroup
from headstart.heads.core import SlabCache, device_of, in_shards, offloaded

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]  # does work; returns what repeats it

_Found = TypeVar("_Found")
_Leaf = tuple[Any, str, Any]  # an object, an attribute of it, and the tensor that it holds
_Captured = tuple[Callable[[], Any], Any, list[_Leaf]]  # what repeats a round, what it returned

_KINDS = 64  # so many graphs are held; then the oldest goes


def captures_rounds(target: PreTrainedModel) -> bool:
    """Whether a target's rounds are captured unless told otherwise: on a GPU, with weights there.

    Weights that are streamed in for each forward lie at no fixed address, and those in shards need
    other processes.
    """
    alone = not offloaded(target) and not in_shards(target)
    return device_of(target).type == "cuda" and alone


class CudaCapture:
    """Captures work as CUDA graphs that share one pool of memory, as they run one by one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        graph.replay()
        return graph.replay


class RoundGraphs:
    """The captured rounds of a speculator, and the tensors that its requests share for them.

    Args:
        capture: how; None where a device has no graphs: the same path, run as it is written.
    """

    def __init__(self, capture: Capture | None = None):
        self._capture = capture
        self._kept: dict[Hashable, Tensor] = {}
        self._captured: dict[Hashable, _Captured | None] = {}  # None: seen once
        self._states: dict[Hashable, list[Any]] = {}
        self._held: list[_Leaf] = []
        self._hosts: dict[torch.Size, deque[Tensor]] = {}

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """As the device allows: CUDA graphs, or the same path uncaptured."""
        return cls(CudaCapture() if device.type == "cuda" else None)

    @property
    def captures(self) -> bool:
        """Whether rounds are captured, as they are until one cannot be."""
        return self._capture is not None

    def keep(self, name: Hashable, value: Tensor) -> Tensor:
        """A copy of `value` in the tensor that stays for this name, shape and dtype."""
        key = (name, value.shape, value.dtype)
        own = self._kept.get(key)
        if own is None:
            own = self._kept[key] = value.clone(memory_format=torch.contiguous_format)
        elif own is not value:
            own.copy_(value)
        return own

    def keep_states(self, states: list[Any]) -> None:
        """Put every tensor that the drafters' states hold where it stays."""
        self._held = [
            (owner, name, self.keep((number, type(owner).__name__, name), value))
            for number, state in enumerate(states)
            for owner, name, value in _leaves(state)
            if isinstance(value, Tensor)
        ]
        _hold(self._held)

    def states(self, drafters: DrafterGroup, batch: int, capacity: int) -> list[Any]:
        """The drafters' states for a request: those of the last request of as many rows."""
        key = (drafters.drafters, batch)
        if key not in self._states:
            self._states[key] = drafters.start(batch, capacity)
        return self._states[key]

    def run(self, kind: Hashable, work: Callable[[], _Found]) -> _Found:
        """Do `work`, a round that leaves all that outlasts it in tensors that stay.

        Args:
            kind: everything that the host decides about the round.
        """
        known = self._captured.get(kind)
        if known is not None:
            replay, result, held = known
            replay()
            _hold(held)
            return result
        if self._capture is None:
            return work()
        if kind not in self._captured:
            self._captured[kind] = None
            while len(self._captured) > _KINDS:
                del self._captured[next(iter(self._captured))]
            return work()
        found: list[_Found] = []
        held = self._held
        try:
            replay = self._capture(lambda: found.append(work()))
        except RuntimeError as error:
            self._capture = None
            _hold(held)  # what the capture would have written was never there
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            warnings.warn(
                f"this round cannot be captured as a CUDA graph ({reason}); decoding goes on "
                "without graphs, more slowly: pass graphs=False to do so from the start.",
                RuntimeWarning,
                stacklevel=2,
            )
            return work()
        self._captured[kind] = replay, found[0], self._held
        return found[0]

    def send(self, report: Tensor) -> Callable[[], np.ndarray]:
        """Start copying a report to the host; what is returned waits for it, and nothing later."""
        hosts = self._hosts.setdefault(report.shape, deque())  # two may be on their way
        if len(hosts) < 2:
            hosts.append(torch.empty_like(report, device="cpu", pin_memory=report.is_cuda))
        else:
            hosts.rotate()
        host = hosts[-1]
        host.copy_(report, non_blocking=True)
        arrived = torch.cuda.Event() if report.is_cuda else None
        if arrived is not None:
            arrived.record()

        def read() -> np.ndarray:
            if arrived is not None:
                arrived.synchronize()
            return host.numpy().copy()

        return read


def repeated(
    device: torch.device, calls: Mapping[Any, Callable[[], Any]]
) -> dict[Any, Callable[[], Any]]:
    """What repeats each call as rounds would: captured where the device has graphs."""
    if device.type != "cuda":
        return dict(calls)
    capture = CudaCapture()
    for work in calls.values():
        work()
    return {name: capture(work) for name, work in calls.items()}


def addresses(*owners: Any) -> Hashable:
    """Where tensors, and those of caches and states, lie; a graph is only good for the same."""
    found = [value for owner in owners for _, _, value in _leaves(owner)]
    return tuple(
        value.data_ptr() if isinstance(value, Tensor) else value.address for value in found
    )


def _hold(leaves: list[_Leaf]) -> None:
    for owner, name, kept in leaves:
        setattr(owner, name, kept)


def _leaves(owner: Any, name: str = "") -> Iterator[_Leaf]:
    """Every tensor and slab cache among an object's attributes, and among theirs, in order."""
    if isinstance(owner, Tensor | SlabCache):
        yield None, name, owner
        return
    for each in owner if isinstance(owner, list) else ():  # several drafters' states
        yield from _leaves(each)
    for name, value in sorted(vars(owner).items()) if hasattr(owner, "__dict__") else ():
        if isinstance(value, Tensor | SlabCache):
            yield owner, name, value
        else:
            yield from _leaves(value)
