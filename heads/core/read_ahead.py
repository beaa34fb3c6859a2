"""Parts that are too large to hold, read ahead in a thread, one after another and over again."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

Read = Callable[[Tensor], None]
"""Reads a part into memory that has room for it."""


class ReadAhead:
    """Reads parts in turns into blocks of memory, ahead of one thread that uses them in that order.

        reads | 0 -> A | 1 -> B | waits | 2 -> A | 3 -> B | …
        uses           | 0 in A         | 1 in B | 2 in A | …

    A block is read into again once it was given back, and what used it has ended. The thread that
    reads ends when all blocks are full, so none stays behind.

    Args:
        parts: how each is read.
        reached: waits for an event of `give_back`.
    """

    def __init__(
        self, parts: Sequence[Read], blocks: Sequence[Tensor], reached: Callable[[Any], None]
    ):
        self._parts, self._reached, self._next = parts, reached, 0
        self._free = deque[tuple[Tensor, Any]]((block, None) for block in blocks)
        self._due = deque[tuple[int, Tensor, Any, Future[None]]]()
        self._thread = _Thread()

    def begin(self) -> None:
        """Have as much read as there is room for, from where the last use ended."""
        while self._free:
            block, after = self._free.popleft()
            future = self._thread.submit(partial(self._read, self._next, block, after))
            self._due.append((self._next, block, after, future))
            self._next = (self._next + 1) % len(self._parts)

    def ready(self, part: int) -> bool:
        """Whether `take` would return at once."""
        if not self._due or self._due[0][0] != part:
            return False
        future = self._due[0][-1]
        return future.done() and future.exception() is None

    def take(self, part: int) -> Tensor:
        """The block that holds a part, when it is read; raises what its reading raised."""
        if not self._due or self._due[0][0] != part:
            self._start_over(part)
        try:
            self._due[0][-1].result()
        except BaseException:
            self._start_over(part, False)
            raise
        return self._due.popleft()[1]

    def give_back(self, block: Tensor, event: Any) -> None:
        """Let a block be read into again, once an event was reached (None: at once)."""
        self._free.append((block, event))
        self.begin()

    def _start_over(self, part: int, begin: bool = True) -> None:
        for _, block, after, future in self._due:
            future.cancel()  # one that runs goes on, and what is read next waits for it
            self._free.append((block, after))
        self._due.clear()
        self._next = part
        if begin:
            self.begin()

    def _read(self, part: int, block: Tensor, after: Any) -> None:
        if after is not None:
            self._reached(after)
        self._parts[part](block)


class _Thread:
    """Does jobs one after another in a thread that ends when there is none."""

    def __init__(self) -> None:
        self._jobs = deque[tuple[Future[None], Callable[[], None]]]()
        self._lock, self._runs = threading.Lock(), False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Have a job done after those before it."""
        future = Future[None]()
        with self._lock:
            if not self._runs:
                threading.Thread(target=self._run, name="weights read ahead").start()
                self._runs = True  # before its first step, which waits for the lock
            self._jobs.append((future, job))
        return future

    def _run(self) -> None:
        while (found := self._following()) is not None:
            future, job = found
            if future.set_running_or_notify_cancel():
                try:
                    job()
                except BaseException as error:  # it is raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del found, future, job  # nothing is held while there is no job

    def _following(self) -> tuple[Future[None], Callable[[], None]] | None:
        with self._lock:
            self._runs = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None
