"""Ends a process with those that it cannot go on without: its launcher and its siblings.

A process whose sibling was killed would wait in a collective until that times out, and one whose
launcher was killed would go on unseen, and write. On its own machine a process sees others end; of
other nodes it has their signs of life.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from .agreement import (
    SILENT,
    beat,
    first_to_say,
    from_all,
    in_parallel,
    signs_of,
    wait_for_all,
)

_BEAT = 5.0  # seconds between signs of life
_UNREACHED = 60.0  # seconds without the store after which the node that keeps it counts as lost


class Lifetime:
    """Watches the launcher and the siblings from a thread, until `close`.

    Nothing is watched in a run of one process, nor where the system has no process handles (it is
    not Linux): there a launcher's end ends nobody.
    """

    def __init__(self) -> None:
        self.closed = False
        self.watched: dict[int, str] = {}  # handle of a process -> what it is
        self.far: dict[int, tuple[int, float]] = {}  # rank elsewhere -> its signs, and since when
        if not in_parallel() or not hasattr(os, "pidfd_open"):
            return
        where = _machine()
        self._watch(os.getppid(), "the launcher")
        for rank, (place, pid) in enumerate(from_all((where, os.getpid()))):
            if place != where:
                self.far[rank] = (-1, 0.0)
            elif pid != os.getpid():
                self._watch(pid, f"process {rank}")
        threading.Thread(target=self._run, name="headstart-lifetime", daemon=True).start()

    def close(self) -> None:
        """Watch no longer: the others may end."""
        self.closed = True

    def _watch(self, pid: int, name: str) -> None:
        with suppress(OSError):  # it runs as another user
            self.watched[os.pidfd_open(pid)] = name

    def _run(self) -> None:
        poll = select.poll()
        for handle in self.watched:
            poll.register(handle, select.POLLIN)
        reached = time.monotonic()
        while not self.closed:
            ended = [self.watched[handle] for handle, _ in poll.poll(_BEAT * 1000)]
            if self.closed:
                return
            if ended:
                self._end(f"{ended[0]} has ended")
            try:
                beat()
                self._listen()
                reached = time.monotonic()
            except Exception:  # the store ends with the launcher that keeps it
                if time.monotonic() - reached > _UNREACHED and not self.closed:
                    self._end("the run's first node cannot be reached")

    def _listen(self) -> None:
        """End with a process of another node that gives no signs of life any more."""
        now = time.monotonic()
        for rank, (known, since) in self.far.items():
            signs = signs_of(rank)
            if signs != known:
                self.far[rank] = (signs, now)
            elif now - since > SILENT and not self.closed:
                self._end(f"process {rank} has given no sign of life for {SILENT:.0f} s")

    def _end(self, reason: str) -> None:
        rank = os.environ.get("RANK")
        message = f"{reason}, and so process {rank} ends; a new start goes on from there"
        print(f"headstart: {message}", file=sys.stderr, flush=True)
        os._exit(1)


_lifetime: Lifetime | None = None


def watch_processes() -> None:
    """End this process with its launcher and its siblings, until `end_processes`."""
    global _lifetime
    if _lifetime is None:
        _lifetime = Lifetime()


def watch_no_longer() -> None:
    """Let the launcher and the siblings end."""
    if _lifetime is not None:
        _lifetime.close()


def is_to_say(message: str) -> bool:
    """Whether this process, which an error ends, is to print it: no other one of the run has."""
    watch_no_longer()  # the others are ending for the same reason
    return first_to_say(message)


def end_processes() -> None:
    """End the process group before the interpreter does: its threads abort a late exit."""
    if not in_parallel():
        return
    gc.collect()  # the trainer has cycles that hold the wrapped model, and so the group
    wait_for_all()
    watch_no_longer()
    torch.distributed.barrier()  # the store may end with process 0
    torch.distributed.destroy_process_group()


def _machine() -> str:
    """The same for processes that have the same numbering of processes."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started} {os.readlink('/proc/self/ns/pid')}"
