"""What the processes of a run agree on."""

from __future__ import annotations

import gc
from typing import TypeVar

import torch

Value = TypeVar("Value")


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


def is_process_0() -> bool:
    """Whether this is the process that owns the run's folders."""
    return not in_parallel() or torch.distributed.get_rank() == 0


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
