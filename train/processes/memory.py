"""What to do where a device has no memory left, in one line."""

from __future__ import annotations

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
