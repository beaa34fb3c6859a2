"""Parts are read ahead in order, into no more than two blocks, and none into one in use."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.core.read_ahead import ReadAhead


class Parts:
    """Five parts, each its number; every read is noted."""

    def __init__(self) -> None:
        self.read = list[int]()
        self.blocks = [torch.zeros(1), torch.zeros(1)]
        self.fails: set[int] = set()
        self.waited = list[object]()
        self.ahead = ReadAhead([self._part(n) for n in range(5)], self.blocks, self.waited.append)

    def _part(self, number: int) -> Any:
        def read(block: Tensor) -> None:
            if number in self.fails:
                raise OSError(f"part {number}")
            self.read.append(number)
            block.fill_(number)

        return read

    def settle(self) -> None:
        """Until the thread has ended."""
        end = time.monotonic() + 20
        while any("read ahead" in each.name for each in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.001)

    def use(self, number: int, event: object = None) -> None:
        block = self.ahead.take(number)
        assert block.item() == number
        self.ahead.give_back(block, event)


def test_in_order_and_two_at_most() -> None:
    parts = Parts()
    parts.ahead.begin()
    parts.settle()
    assert parts.read == [0, 1] and parts.ahead.ready(0) and not parts.ahead.ready(1)
    for number in [0, 1, 2, 3, 4, 0, 1]:
        parts.use(number)
    parts.settle()
    assert parts.read == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_a_block_in_use_is_left_alone() -> None:
    parts = Parts()
    block = parts.ahead.take(0)
    parts.settle()
    assert parts.read == [0, 1] and block.item() == 0
    parts.ahead.give_back(block, "its copy")
    parts.settle()
    assert parts.read == [0, 1, 2] and block.item() == 2
    assert parts.waited == ["its copy"], "before it was read into"


def test_from_another_part() -> None:
    """As after a forward that ended in the middle; what waits for an event still does."""
    parts = Parts()
    parts.use(0, "copy of 0")
    parts.use(1, "copy of 1")
    parts.use(0)
    parts.settle()
    assert parts.read[:2] == [0, 1] and parts.read[-3:] == [0, 1, 2]
    assert set(parts.waited) == {"copy of 0", "copy of 1"}


def test_an_error_is_raised_where_the_part_is_taken() -> None:
    parts = Parts()
    parts.fails = {2}
    parts.use(0)
    parts.use(1)
    parts.settle()
    assert not parts.ahead.ready(2)
    for _ in range(2):
        with pytest.raises(OSError, match="part 2"):
            parts.ahead.take(2)
    parts.use(0)
    parts.fails = set()
    for number in range(1, 5):
        parts.use(number)
    parts.settle()
