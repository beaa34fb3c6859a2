"""A device without memory is told of in one line."""

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.processes.memory import WRITING, enough_memory


def test_the_remedy_is_named() -> None:
    with enough_memory(WRITING):
        pass
    with pytest.raises(OptionError) as said, enough_memory(WRITING):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
    assert str(said.value) == (
        "no memory is left (CUDA out of memory. Tried to allocate 2.00 GiB); lower "
        "distill.batch_size."
    )
    with pytest.raises(RuntimeError, match="another"), enough_memory(WRITING):
        raise RuntimeError("another")
