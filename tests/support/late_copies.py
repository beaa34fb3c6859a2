"""A stand-in for the stream that weights are copied to a GPU on, for the CPU."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headstart.heads.core import prefetch
from tests.support.tape import Place


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list["Late"]:
    """Layers are brought ahead as where the target is on a GPU; returns the streams, when made."""
    made = list[Late]()

    def stream(device: torch.device) -> Late:
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(prefetch, "CopyStream", stream)
    monkeypatch.setattr(prefetch, "device_of", lambda model: torch.device("cuda"))
    return made


def place(tensor: Tensor) -> Place:
    return Place(tensor, StorageWeakRef(tensor.untyped_storage()), "a copy")


class Late:
    """In the place of `CopyStream`: a copy is done when it is waited for, and holds no memory.

    Until then there is NaN where it goes to. A copy that does not wait for who reads there fails.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.pending: list[tuple[Place, Place]] = []
        self.copies = self.pinned = 0
        self._reader: dict[int, object] = {}  # by the address: the event behind who reads there
        self._lock = threading.Lock()

    def host_memory(self, size: int) -> Tensor:
        self.pinned += size
        return torch.empty(size, dtype=torch.uint8)

    def device_memory(self, size: int) -> Tensor:
        found = torch.empty(size, dtype=torch.uint8)
        self._reader[found.data_ptr()] = "who had this memory before"
        return found

    def copy(self, to: Tensor, source: Tensor, after: Any) -> Any:
        reader = self._reader[to.data_ptr()]
        assert reader is after, "somebody may be reading what is overwritten"
        to.fill_(255)
        with self._lock:
            self.pending.append((event := place(to), place(source)))
        self.copies += 1
        return event

    def wait(self, event: Any) -> None:
        self.reached(event)
        self.computes(event)

    def computes(self, event: Any) -> None:
        """From now on what was copied is read."""
        self._reader[event.tensor().data_ptr()] = "it computes"

    def reached(self, event: Any) -> None:
        with self._lock:
            while event in [each for each, _ in self.pending]:
                to, source = self.pending.pop(0)
                to.tensor().copy_(source.tensor())

    def mark(self) -> Any:
        event = object()
        for address, reader in self._reader.items():
            if isinstance(reader, str):
                self._reader[address] = event
        return event
