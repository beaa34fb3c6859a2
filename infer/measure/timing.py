"""One clock for every device: CUDA events on a GPU, `perf_counter` elsewhere."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]

_LONG = 0.2
"""A call that takes so many seconds is timed well enough alone."""


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Marks points in a device's work, and says how far apart they are.

    On a GPU a mark is an event in the stream: making it waits for nothing, and what lies between
    two of them holds the time in which the device waited for the host as well. Made while a graph
    is captured it is part of the graph, and each replay makes it anew.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Any:
        """A point in time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one mark to another; waits until the device has reached both."""
        if self.device.type != "cuda":
            return 1e3 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)


def interleaved(
    contenders: Mapping[Any, Call],
    device: torch.device,
    repeats: int,
    calls: int,
    tick: Call = lambda: None,
    seconds: float = math.inf,
) -> dict[Any, list[float]]:
    """Milliseconds a call of each contender, in each of `repeats` turns.

    The contenders take turns, so that a machine whose speed drifts slows all of them alike. A turn
    is one call that is not timed, since it finds the caches full of another's data, and `calls`
    that are timed as a whole; of long calls, one.

    Args:
        tick: called after each turn of all, and for those that are left out.
        seconds: after so many no further turn of all is begun; the first one always is.
    """
    watch = Stopwatch(device)
    times: dict[Any, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    for turn in range(repeats):
        late = turn > 0 and time.perf_counter() > end
        for name, contender in () if late else contenders.items():
            started = time.perf_counter()
            contender()
            wait(device)
            burst = calls if time.perf_counter() - started < _LONG else 1
            begun = watch.mark()
            for _ in range(burst):
                contender()
            times[name].append(watch.between(begun, watch.mark()) / burst)
        tick()
    return times


def medians(times: Mapping[Any, list[float]]) -> dict[Any, float]:
    """The median of each contender's turns."""
    return {name: statistics.median(each) for name, each in times.items()}
