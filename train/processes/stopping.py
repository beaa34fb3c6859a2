"""Ctrl-C and SIGTERM: training finishes its step and saves; anything else ends within a second."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, Self

_LATE = 0.6  # seconds after which the process is ended by the thread that watches


class Interrupted(SystemExit):
    """Training was stopped by a signal, with a checkpoint; its code is the exit status."""


class StopSignals:
    """While a `with` block lasts, SIGTERM and the first Ctrl-C only ask for an end.

    A second Ctrl-C ends the process at once. Outside of the main thread nothing is changed.
    """

    active: ClassVar[StopSignals | None] = None

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that asked
        self._said = threading.Lock()  # held from the first message on
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._received)
            StopSignals.active = self
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        StopSignals.active = None

    def announce(self) -> bool:
        """Say that the step is finished first; False where that was said before."""
        first = self._said.acquire(blocking=False)
        if first:
            self._since = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                say("stopping after this step, with a checkpoint; Ctrl-C again ends at once")
        return first

    def again(self) -> bool:
        """Whether a Ctrl-C now is a second one of the user's.

        A launcher passes on the one that the terminal has sent to all of its group.
        """
        return "RANK" not in os.environ or time.monotonic() - self._since > 1

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT == self.number and self.again():
            end("ended in the middle of a step; earlier checkpoints and finished stages are kept")
        self.announce()
        if self.number is None:
            self.number = number


class CtrlC:
    """Ends the process within a second of Ctrl-C while a `with` block lasts, with a last message.

    Python raises KeyboardInterrupt between two of its own instructions, and one of them may be a
    product or a file that takes long. The system tells a thread at once, which waits for a moment
    and then ends the process. Training says that it goes on to the end of its step, and is ended by
    the second Ctrl-C. What has something to do first, such as a chat, is not ended, see
    `after_ctrl_c_it_goes_on`.

    Args:
        message: what is true of an interrupted command.
    """

    def __init__(self, message: str):
        self.message = message
        self._answered = threading.Event()
        self._before, self._told = -1, -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            told, self._told = os.pipe()
            os.set_blocking(self._told, False)
            self._before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(told,), daemon=True).start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._answered.set()
        if self._told >= 0:
            signal.set_wakeup_fd(self._before)
            os.close(self._told)  # which ends the thread

    def _watch(self, told: int) -> None:
        while numbers := os.read(told, 1):
            if numbers[0] != signal.SIGINT:
                continue
            stopping = StopSignals.active
            if stopping is not None and (stopping.announce() or not stopping.again()):
                continue
            if not self._answered.wait(_LATE):
                end(self.message)


@contextmanager
def after_ctrl_c_it_goes_on() -> Iterator[None]:
    """While a `with` block lasts, no `CtrlC` ends the process: something is to be done first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def say(message: str) -> None:
    """A line on stderr, also from within a handler of signals, where print is not allowed."""
    with suppress(OSError):
        os.write(2, f"\nheadstart: {message}\n".encode())


def end(message: str) -> None:
    """Say so, and end the process at once, as Ctrl-C does."""
    say(message)
    os._exit(128 + signal.SIGINT)
