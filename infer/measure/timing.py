"""One clock for every device, and measurements that take turns.

Calls that are compared take turns, so that a machine whose speed drifts slows all of them alike;
what is reported of each is a median over its turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

Call = Callable[[], Any]

_LONG = 200.0  # milliseconds; a call that takes so many is timed well enough alone


class Stopwatch:
    """Marks points in a device's work, and says how far apart they are.

    On a GPU a mark is an event in the stream: making it waits for nothing, and the time between two
    of them includes the time in which the device waited for the host. A mark that is made while a
    graph is captured is part of the graph, and each replay makes it anew. Elsewhere it is
    `perf_counter`.
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

    def time(self, call: Call, calls: int = 1) -> float:
        """Milliseconds a call, of so many that are timed as a whole."""
        begin = self.mark()
        for _ in range(calls):
            call()
        return self.between(begin, self.mark()) / calls


def take_turns(
    runs: Mapping[Any, Callable[[Any], Any]],
    turns: Iterable[Any],
    tick: Call = lambda: None,
    seconds: float = math.inf,
) -> dict[Any, list[Any]]:
    """Call every one of `runs` with each turn's value, turn by turn; what they returned, by name.

    Args:
        tick: called after each turn of all, and for those that are left out.
        seconds: after so many no further turn is begun; the first one always is.
    """
    found: dict[Any, list[Any]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    for number, value in enumerate(turns):
        late = number > 0 and time.perf_counter() > end
        for name, run in () if late else runs.items():
            found[name].append(run(value))
        tick()
    return found


def interleaved(
    calls: Mapping[Any, Call],
    device: torch.device,
    repeats: int,
    burst: int,
    tick: Call = lambda: None,
    seconds: float = math.inf,
) -> dict[Any, list[float]]:
    """Milliseconds of each call, in each of `repeats` turns; see `take_turns`.

    In a turn it is called once to fill the caches with its own data, and then `burst` times, which
    are timed as a whole; a long one once.
    """
    watch = Stopwatch(device)

    def timed(call: Call, turn: int) -> float:
        return watch.time(call, burst if watch.time(call) < _LONG else 1)

    runs = {name: partial(timed, call) for name, call in calls.items()}
    return take_turns(runs, range(repeats), tick, seconds)


def medians(times: Mapping[Any, list[float]]) -> dict[Any, float]:
    """The median of each call's turns."""
    return {name: statistics.median(each) for name, each in times.items()}
