"""What the processes of a run agree on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TypeVar

import torch

Value = TypeVar("Value")


class StoppedByProcess0(ValueError):
    """Process 0 has stopped, and says why; the other processes end with it."""


def in_parallel() -> bool:
    """Whether this process is one of several of a run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def from_process_0(value: Value) -> Value:
    """The value that process 0 passes, on every process; all must call."""
    if not in_parallel():
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


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


def is_process_0() -> bool:
    """Whether this is the process that owns the run's folders.

    A launcher numbers its processes before they know of each other.
    """
    if in_parallel():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    """Return when every process has called."""
    if in_parallel():
        torch.distributed.barrier()


def end_processes() -> None:
    """End the process group before the interpreter does: its threads abort a late exit."""
    if in_parallel():
        gc.collect()  # the trainer has cycles that hold the wrapped model, and so the group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
