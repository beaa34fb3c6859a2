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

import inspect
import logging
import traceback
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import logits_process as hf

from headstart.heads import DrafterGroup, Sampling
from headstart.heads.core import SlabCache, device_of, in_shards, offloaded

from .capture import Capture, Captured, capture_on

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_Leaf = tuple[Any, str, Any]  # an object, an attribute of it, and the tensor that it holds

_KINDS = 64  # so many graphs are held; then the one that was used longest ago goes

_WAITING = (hf.EtaLogitsWarper, hf.TopHLogitsWarper)
"""Processors of single rows that read the device: their distributions check their arguments."""


def captures_rounds(target: PreTrainedModel) -> bool:
    """Whether a target's rounds are captured unless told otherwise: on a GPU, where they can be."""
    if device_of(target).type != "cuda":
        return False
    if (reason := never_captured(target)) is not None:
        logger.info("No CUDA graphs: %s.", reason)
    return reason is None


def never_captured(target: PreTrainedModel) -> str | None:
    """Why no round of a target can be captured, on whichever GPU; None where one may be."""
    if offloaded(target):  # weights that are streamed in lie at no fixed address
        return "the target's weights are streamed in for each forward, which no graph repeats"
    if in_shards(target):
        return "processes hold parts of the target, and each forward waits for the others"
    if len(devices := {weight.device for weight in target.parameters()}) > 1:
        names = " and ".join(sorted(map(str, devices)))
        return f"the target is spread over {names}, and a graph is of one device"
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    waiting = {"dynamic"} | ({"longrope"} if _longrope_waits() else set())
    for entry in nested or [rope]:
        if (kind := entry.get("rope_type")) in waiting:
            return f"{kind} rotary scaling compares positions on the host in every forward"
    return None


def _longrope_waits() -> bool:
    """Before 5.23 it did; later versions choose the frequencies on the device."""
    return tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def never_captured_with(sampling: Sampling) -> str | None:
    """Why no round can be captured that chooses tokens so; None where one may be."""
    for item in sampling.processors or ():
        if isinstance(item, _WAITING):
            return f"{type(item).__name__} waits for the GPU to check what it is given"
    return None


@dataclass(frozen=True)
class _Round:
    """A captured round, and where it leaves what the drafters' states hold."""

    captured: Captured
    held: list[_Leaf]


class _Failed:
    """In the place of a round that could not be captured."""


class RoundGraphs:
    """The captured rounds of a speculator, and the tensors that its requests share for them.

    Args:
        capture: how; None where a device has no graphs: the same path, run as it is written.

    Attributes:
        replayed: how many rounds were.
        failed: why rounds could not be captured, a line for each kind of them.
    """

    def __init__(self, capture: Capture | None = None):
        self._capture = capture
        self._kept: dict[Hashable, Tensor] = {}
        # None: seen once.
        self._rounds: OrderedDict[Hashable, _Round | type[_Failed] | None] = OrderedDict()
        self._states: dict[Hashable, list[Any]] = {}
        self._held: list[_Leaf] = []
        self._hosts: dict[torch.Size, deque[Tensor]] = {}
        self.replayed, self.failed = 0, list[str]()

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """As the device allows: CUDA graphs, or the same path uncaptured."""
        return cls(capture_on(device))

    @property
    def captures(self) -> bool:
        """Whether rounds are captured, all that can be."""
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
        """Put every tensor that the drafters' states hold from one round to the next where it
        stays."""
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

    def release(self) -> None:
        """Let go of every round, and of all that stays for them; no request may be running."""
        self._rounds.clear()
        self._states.clear()
        self._kept.clear()
        self._held = []

    def run(self, kind: Hashable, work: Callable[[], _Found]) -> _Found:
        """Do `work`, a round that leaves all that the next one reads in tensors that stay.

        What it returns is the same tensors for all rounds of a kind: each writes them again.

        Args:
            kind: everything that the host decides about the round.
        """
        known = self._rounds.get(kind)
        if kind in self._rounds:
            self._rounds.move_to_end(kind)
        if isinstance(known, _Round):
            self.count_replay()
            result = known.captured()
            _hold(known.held)
            return result
        if self._capture is None or known is _Failed:
            return work()
        if kind not in self._rounds:
            self._rounds[kind] = None
            while len(self._rounds) > _KINDS:
                self._rounds.popitem(last=False)
            return work()
        held = self._held
        try:
            captured = Captured.by(self._capture, work)
        except RuntimeError as error:
            self._rounds[kind] = _Failed
            _hold(held)  # what the capture would have written was never there
            what = (str(error).strip().splitlines() or ["no reason given"])[0]
            self._tell(what + _where(error))
            return work()
        self._rounds[kind] = _Round(captured, self._held)
        return captured.result

    def count_replay(self) -> None:
        """One more round is replayed."""
        self.replayed += 1

    def refuse(self, reason: str) -> None:
        """Say why rounds of a request are not captured, which is known beforehand."""
        if reason not in self.failed and self.captures:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        self.failed.append(reason)
        warnings.warn(
            f"this round cannot be captured as a CUDA graph ({reason}); such rounds run without "
            "one, more slowly: pass graphs=False to have all of them do so from the start.",
            RuntimeWarning,
            stacklevel=3,
        )

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
            arrived.record(torch.cuda.current_stream(report.device))

        def read() -> np.ndarray:
            if arrived is not None:
                arrived.synchronize()
            return host.numpy().copy()

        return read


def _where(error: BaseException) -> str:
    """Which line of ours an error came from, in words; empty where it came from none."""
    room, capturing = Path(__file__).parent, (__file__, inspect.getfile(Captured))
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if file not in capturing and room.parent in Path(file).parents:
            return f", in line {line} of {Path(file).relative_to(room.parent)}"
    return ""


def repeated(
    device: torch.device, calls: Mapping[Any, Callable[[], Any]]
) -> dict[Any, Callable[[], Any]]:
    """What repeats each call as rounds would: captured where the device has graphs."""
    capture = capture_on(device)
    if capture is None:
        return dict(calls)
    for work in calls.values():
        work()
    # Each call stays with its graph, and all that it has closed over.
    captured = {name: (Captured.by(capture, work), work) for name, work in calls.items()}
    return {name: lambda pair=pair: pair[0]() for name, pair in captured.items()}


def as_now(states: Any) -> Callable[[], None]:
    """What puts the tensors that states hold now back in their places; it keeps them, too."""
    held = [leaf for leaf in _leaves(states) if isinstance(leaf[2], Tensor)]
    return partial(_hold, held)


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
    """Every tensor and slab cache among an object's attributes, and among theirs, in order.

    But for those that are named by its class's `scratch`, see `Drafter.start`.
    """
    if isinstance(owner, Tensor | SlabCache):
        yield None, name, owner
        return
    for each in owner if isinstance(owner, list) else ():  # several drafters' states
        yield from _leaves(each)
    scratch = getattr(owner, "scratch", ())
    for name, value in sorted(vars(owner).items()) if hasattr(owner, "__dict__") else ():
        if name in scratch:
            continue
        if isinstance(value, Tensor | SlabCache):
            yield owner, name, value
        else:
            yield from _leaves(value)
