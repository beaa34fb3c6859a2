"""The memory that was used, and a device without memory, which is told of in one line."""

import sys

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.processes.memory import WRITING, enough_memory, peak_memory


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


def test_the_memory_used_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    used = peak_memory()
    assert used > 1e7
    monkeypatch.setattr(sys, "platform", "darwin")  # which counts in bytes, not in KiB
    assert peak_memory() == pytest.approx(used / 1024, rel=0.1)
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows
    assert peak_memory() == 0
