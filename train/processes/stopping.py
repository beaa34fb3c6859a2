"""Ends training on a signal after the step that it is in, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self


class Interrupted(SystemExit):
    """Training was stopped by a signal, with a checkpoint; its code is the exit status."""


class StopSignals:
    """While a `with` block lasts, SIGTERM and the first Ctrl-C only ask for an end.

    A second Ctrl-C ends the process at once. Outside of the main thread nothing is changed.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that asked
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a worker of the data loader, which its owner ends
        # A launcher passes on the Ctrl-C that the terminal has sent to all of its group.
        if number == signal.SIGINT == self.number and time.monotonic() - self._since > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self.number is None and os.environ.get("RANK", "0") == "0":
            words = "stopping after this step, with a checkpoint; Ctrl-C again ends at once"
            with suppress(OSError):
                os.write(2, f"\nheadstart: {words}\n".encode())  # print is not for handlers
        if self.number is None:
            self.number, self._since = number, time.monotonic()
