"""Ends a process with those that it cannot go on without: its launcher and its siblings.

A process whose sibling was killed would wait in a collective until that times out, and one whose
launcher was killed would go on unseen, and write.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from .agreement import beat, from_all, in_parallel, wait_for_all

_BEAT = 5.0  # seconds between signs of life


class Lifetime:
    """Watches the launcher and the siblings on this machine from a thread, until `close`.

    Nothing is watched in a run of one process, nor where the system has no process handles (it is
    not Linux): there a launcher's end ends nobody.
    """

    def __init__(self) -> None:
        self.closed = False
        self.watched: dict[int, str] = {}  # handle of a process -> what it is
        if not in_parallel() or not hasattr(os, "pidfd_open"):
            return
        where = _machine()
        self._watch(os.getppid(), "the launcher")
        for rank, (place, pid) in enumerate(from_all((where, os.getpid()))):
            if place == where and pid != os.getpid():
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
        while not self.closed:
            ended = [self.watched[handle] for handle, _ in poll.poll(_BEAT * 1000)]
            if self.closed:
                return
            if ended:
                self._end(ended[0])
            with suppress(Exception):  # the store ends with the launcher, which is noticed above
                beat()

    def _end(self, name: str) -> None:
        rank = os.environ.get("RANK")
        message = f"{name} has ended, and so does process {rank}; a new start goes on from there"
        print(f"headstart: {message}", file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():
            child.kill()
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
