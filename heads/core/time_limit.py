"""A limit on the time of a call that runs what others wrote, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call()` returns or raises, which runs in a thread of its own.

    Past the limit that thread is ended, as soon as it runs Python code again.

    Raises:
        TimeoutError: the call took longer.

    >>> within(5, lambda: 3)
    3
    """
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:  # on Ctrl-C too
        if (late := thread.is_alive()) and thread.ident is not None:
            ended = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ended)
    if late:
        raise TimeoutError(f"it took longer than {seconds:g} s")
    if failed:
        raise failed[0]
    return found[0]
