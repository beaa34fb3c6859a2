"""What the processes of a run agree on.

Waits that may be long go through the store that the launcher keeps, not through collectives, whose
timeout is for processes that do the same work. So nobody waits for a process that is no more: each
counts up a number of its own there, and who waits sees that it stands still.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count, zip_longest
from typing import Any, TypeVar, cast

import torch

Value = TypeVar("Value")

SILENT = 300.0
"""Seconds without a sign of life after which a process counts as lost."""

_KEPT_BY_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
_REACHED = 10  # seconds within which the launcher's store answers, or is gone

_numbers = count()  # of the waits so far; all processes make the same ones


class StoppedByProcess0(ValueError):
    """Process 0 has stopped, and says why; the other processes end with it."""


class ProcessLost(ConnectionError):
    """The launcher, or another process of the run, does not answer any more."""


def check_launcher() -> None:
    """Raise ProcessLost where a launcher has started this process and is gone.

    It keeps the store that processes find each other by, and they would look for it for as long as
    collectives may take.
    """
    if os.environ.get(_KEPT_BY_LAUNCHER) == "True" and _launchers_store() is None:
        raise ProcessLost(
            f"process {os.environ.get('RANK')} was started by a launcher that has ended, or that "
            f"does not answer at {os.environ.get('MASTER_ADDR')}; start the run again."
        )


def in_parallel() -> bool:
    """Whether this process is one of several of a run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_process_0() -> bool:
    """Whether this is the process that owns the run's folders.

    A launcher numbers its processes before they know of each other.
    """
    if in_parallel():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def from_process_0(value: Value) -> Value:
    """The value that process 0 passes, on every process; all must call, as late as they like."""
    if not in_parallel():
        return value
    key, found = f"headstart/value/{next(_numbers)}", store()
    if is_process_0():
        found.set(key, pickle.dumps(value))
        return value
    _wait(lambda: found.check([key]), "process 0")
    return pickle.loads(found.get(key))


def on_process_0(work: Callable[[], Value]) -> Value:
    """What `work` returns on process 0, on every process; all must call.

    Raises:
        StoppedByProcess0: on the others, where `work` raised on process 0, with its message.
    """
    if not in_parallel():
        return work()
    held, error = None, None
    if is_process_0():
        try:
            held = work()
        except Exception as raised:
            error = raised
    failed, held = from_process_0((error and (str(error) or type(error).__name__), held))
    if error is not None:
        raise error
    if failed is not None:
        raise StoppedByProcess0(failed)
    return held  # type: ignore[return-value]


def wait_for_all(meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Return when every process has called, however late; `meanwhile` is called now and then."""
    if in_parallel():
        key, found, world = f"headstart/wait/{next(_numbers)}", store(), world_size()
        found.add(key, 1)
        _wait(lambda: found.add(key, 0) >= world, "the other processes", meanwhile)


class Total:
    """A number that grows; where it is `shared`, all processes make it, and any may add to it."""

    def __init__(self, shared: bool):
        self._key = f"headstart/total/{next(_numbers)}" if shared and in_parallel() else None
        self._own = 0

    def add(self, count: int = 0) -> int:
        """The number so far, with `count` added."""
        if self._key is not None:
            return store().add(self._key, count)
        self._own += count
        return self._own


def from_each(value: Value) -> list[Value]:
    """What each process passes, in their order; all must call, as late as they like."""
    if not in_parallel():
        return [value]
    key, found = f"headstart/each/{next(_numbers)}", store()
    keys = [f"{key}/{rank}" for rank in range(world_size())]
    found.set(keys[torch.distributed.get_rank()], pickle.dumps(value))
    _wait(lambda: found.check(keys), "the other processes")
    return [pickle.loads(found.get(each)) for each in keys]


def own_share(items: Sequence[Value]) -> list[Value]:
    """The items that fall to this process, which are dealt out in turn; all of them where alone."""
    if not in_parallel():
        return list(items)
    return list(items[torch.distributed.get_rank() :: world_size()])


def in_turn(shares: Sequence[Sequence[Value]]) -> list[Value]:
    """The items whose `own_share` each process had.

    >>> in_turn([[0, 3], [1, 4], [2]])
    [0, 1, 2, 3, 4]
    """
    rounds = zip_longest(*([(item,) for item in share] for share in shares), fillvalue=())
    return [item for dealt in rounds for some in dealt for item in some]


def from_all(value: Value) -> list[Value]:
    """What each process passes, in their order; all must call at about the same time."""
    if not in_parallel():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def sum_over_processes(numbers: list[float], device: torch.device) -> list[float]:
    """The sums of numbers that each process passes; all must call at about the same time."""
    if not in_parallel():
        return numbers
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def store() -> Any:
    """The keys and values that all processes of the run see."""
    return torch.distributed.distributed_c10d._get_default_store()


def first_to_say(message: str) -> bool:
    """Whether no other process has said the same; any may call, or none.

    A mistake in the recipe ends them before they are a group; then they share their launcher's
    store.
    """
    found = store() if in_parallel() else _launchers_store()
    key = hashlib.sha256(message.encode()).hexdigest()
    return found is None or found.add(f"headstart/said/{key}", 1) == 1


class SaidByAll(logging.Filter):
    """Lets the first of several processes print what all of them warn of."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[str] = Counter()  # that this process has said it

    def filter(self, record: logging.LogRecord) -> bool:
        if not in_parallel():
            return True
        message = record.getMessage()
        self._times[message] += 1
        try:
            return first_to_say(f"warning {self._times[message]}: {message}")
        except RuntimeError:  # the store is gone, and the run ends
            return True


def _launchers_store() -> Any:
    """The store that torch's launcher keeps for its processes; None without one."""
    if os.environ.get(_KEPT_BY_LAUNCHER) != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit, distributed = timedelta(seconds=_REACHED), cast("Any", torch.distributed)
    try:
        # Where nobody listens, torch's client would try again and again, and print that it does.
        socket.create_connection((host, port), _REACHED).close()
        return distributed.TCPStore(host, port, is_master=False, timeout=limit)
    except (OSError, RuntimeError, ValueError):  # it is gone, or was never reached
        return None


def beat() -> None:
    """Give a sign of life to the processes that wait for this one."""
    store().add(f"headstart/alive/{torch.distributed.get_rank()}", 1)


def signs_of(rank: int) -> int:
    """How many signs of life a process has given so far."""
    return store().add(f"headstart/alive/{rank}", 0)


def world_size() -> int:
    """How many processes the run has, which is `in_parallel`."""
    return torch.distributed.get_world_size()


def _wait(done: Callable[[], bool], whom: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Return when it is done; ProcessLost when a process has been silent for too long."""
    others = [rank for rank in range(world_size()) if rank != torch.distributed.get_rank()]
    signs: dict[int, tuple[int, float]] = {}
    pause, looked = 0.001, 0.0
    while not done():
        time.sleep(pause)
        meanwhile()
        pause = min(2 * pause, 0.25)
        if (now := time.monotonic()) < looked + 5:
            continue
        looked = now
        for rank in others:
            sign = signs_of(rank)
            known, since = signs.get(rank, (None, now))
            signs[rank] = (sign, since if sign == known else now)
            if now - signs[rank][1] > SILENT:
                raise ProcessLost(
                    f"process {os.environ.get('RANK', '?')} waited for {whom}, and process {rank} "
                    f"has given no sign of life for {SILENT:.0f} s; start the run again, which "
                    "goes on from what is finished."
                )
