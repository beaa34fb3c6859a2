"""The memory that a process has used, and what to do where a device has none left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headstart.heads import OptionError
from headstart.heads.core.errors import brief

TRAINING = (
    "lower train.batch_size (train.rows_per_step keeps the rows of a step), or set "
    "train.activation_checkpointing=true"
)
WRITING = "lower distill.batch_size"


def peak_memory() -> int:
    """The most bytes that this process has used, of its GPU if there is one; 0 if not known."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # no POSIX
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def enough_memory(remedy: str, kept: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Raise OptionError where a GPU has no memory left for what the `with` block does.

    Args:
        kept: a sentence on what is kept of the work so far.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = brief(error).partition(" Including")[0].rstrip(".")
        raise OptionError(f"no memory is left ({said}); {remedy}. {kept()}".rstrip()) from error
