"""The processes that hold the other parts of a target, and run what they are told to."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch

from headstart.heads import DecodingError, HeadstartError
from headstart.heads.core import brief, physical_cores

from .sent import receive, send

_WORKER = "headstart.infer.tensor_parallel.worker"
_ENDS = 0.5  # seconds in which a process that can end has done so
_POLLS = 0.1  # seconds after which it is looked whether one has
_PATIENCE = 60  # seconds that a forward may wait for a process that has ended
_LATE = timedelta(hours=2)  # after which a process counts as lost; loading may take long

ALONE = ("spare", "keep", "resize", "reserve", "adopt", "release", "commit")
"""What each process does without the others, which so may lack memory for it."""

_lost = ""
"""Why this process can lead no others any more: a thread of it waits for ever to be connected."""

_numbers = itertools.count()  # of what the workers keep: models, targets and caches


class Workers:
    """The other processes, which run what they are told to.

    Args:
        processes: with this one; device: `cuda`, where each has a GPU of its own, or `cpu`.

    Attributes:
        lost: why they cannot be told anything any more; empty while they can.

    Raises:
        DecodingError: one of them ends before it is ready, or one has while an earlier group was
            being connected.
    """

    def __init__(self, processes: int, device: str):
        if _lost:
            raise DecodingError(_lost)
        self.processes, self.device, self.lost = processes, device, ""
        self._lock = threading.RLock()
        self._runs: int | None = None  # the thread that runs what the others run, too
        self._dropped: list[int] = []  # numbers of what is not needed any more
        distributed = cast("Any", torch.distributed)
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, processes, is_master=True, wait_for_workers=False, timeout=_LATE
        )
        threads = max(physical_cores() // processes, 1)
        command = [sys.executable, "-m", _WORKER, device, str(self._store.port), str(processes)]
        place = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if device == "cpu":
            place["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(min(torch.get_num_threads(), threads))
        self._started = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **place, "LOCAL_RANK": str(rank)},
                start_new_session=True,  # so that Ctrl-C reaches this process alone
            )
            for rank in range(1, processes)
        ]
        atexit.register(self.close)
        self.answers()
        self._connect()
        threading.Thread(target=_watch, args=[weakref.ref(self)], daemon=True).start()

    def _connect(self) -> None:
        """Make this process one of those that compute together.

        Both gloo and NCCL go on waiting for a process that has ended. So a thread waits for them,
        and is left behind where one of the others ends.
        """
        global _lost
        errors: list[Exception] = []

        def connect() -> None:
            try:
                join(self._store, 0, self.processes, self.device)
            except Exception as error:
                errors.append(error)

        place_of(0, self.device)
        waits = threading.Thread(target=connect, name="headstart-connects", daemon=True)
        waits.start()
        while waits.is_alive():
            waits.join(_POLLS)
            if waits.is_alive() and any(each.poll() is not None for each in self._started):
                ended = self._ended()
                _lost = f"a divided target was not connected ({ended}); start in a new process."
                self.lost = _lost
                self.close()
                raise DecodingError(_lost)
        if errors:
            raise self._broken(errors[0]) from errors[0]

    def _ended(self) -> str:
        """Which of the others has ended, in words; empty where none has."""
        for number, each in enumerate(self._started, 1):
            if each.poll() is not None:
                return f"process {number} ended with status {each.poll()}"
        return ""

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs what the others run, too."""
        return self._runs == threading.get_ident()

    @contextmanager
    def together(self, name: str, *what: Any) -> Iterator[None]:
        """What is run meanwhile, the workers run as well, by that name; nothing within is told.

        Ctrl-C waits until it has ended: a forward that is cut off leaves the others waiting.

        Raises:
            DecodingError: a process has ended, or had too little memory for its part of a forward.
        """
        with self._lock:
            if self.inside:
                yield
                return
            with _without_interrupts():
                self._tell(name, *what)
                self._runs = threading.get_ident()
                try:
                    yield
                except HeadstartError:
                    raise  # which the others meet as well
                except torch.OutOfMemoryError as error:
                    if name in ALONE:
                        raise
                    raise self._broken(error) from error
                except Exception as error:
                    raise self._broken(error) from error
                finally:
                    self._runs = None

    @contextmanager
    def answered(self, name: str, *what: Any) -> Iterator[None]:
        """As `together`, of what each does without the others, and answers to; Ctrl-C ends them.

        Raises:
            DecodingError: what one of them says, or that it has ended.
        """
        with self._lock:
            self._tell(name, *what)
            try:
                yield
            except Exception:
                with suppress(DecodingError):  # which says the same
                    self.answers()
                raise
            except BaseException:
                self._broken(InterruptedError("interrupted"))
                raise
            self.answers()

    def _tell(self, *what: Any) -> None:
        if self.lost:
            raise DecodingError(self.lost)
        dropped = self._dropped.copy()
        try:
            send((dropped, *what), *(cast("Any", each.stdin) for each in self._started))
        except OSError as error:
            raise self._broken(error) from error
        del self._dropped[: len(dropped)]

    def answers(self) -> None:
        """Wait until each worker has done what it answers to.

        Raises:
            DecodingError: what one of them says, or that it has ended.
        """
        try:
            said = [receive(cast("Any", each.stdout)) for each in self._started]
        except EOFError as error:
            raise self._broken(error) from error
        if errors := list(filter(None, said)):
            raise DecodingError(f"another process of a divided target: {errors[0]}")

    @staticmethod
    def next_number() -> int:
        """One that nothing has had."""
        return next(_numbers)

    def number(self, kept: Any) -> int:
        """A number for what the workers keep one of as well, as long as `kept` is there."""
        weakref.finalize(kept, self.drop, number := self.next_number())
        return number

    def drop(self, number: int) -> None:
        """What has this number is not needed any more."""
        self._dropped.append(number)  # told with what comes next, not from a garbage collection

    def _broken(self, error: Exception) -> DecodingError:
        """The error for processes that do not run the same any more; it ends them."""
        time.sleep(_ENDS)  # so that one which has ended is known to have
        why = self._ended() or brief(error) or type(error).__name__
        self.lost = f"a divided target has lost its processes ({why}); load it again."
        self.close()
        return DecodingError(self.lost)

    def close(self) -> None:
        """End the workers."""
        self.lost = self.lost or "the processes of this target have been ended; load it again."
        atexit.unregister(self.close)
        for each in self._started:
            with suppress(OSError):  # it has ended, and something was not written
                cast("Any", each.stdin).close()
        for each in self._started:
            try:
                each.wait(_ENDS)
            except subprocess.TimeoutExpired:
                each.kill()
            cast("Any", each.stdout).close()
        with suppress(Exception):  # whatever a group says whose other processes have gone
            torch.distributed.destroy_process_group()


def _watch(watched: weakref.ref[Workers]) -> None:
    """End this process where a forward goes on waiting for another that has ended.

    gloo raises an error then, but seldom does not, and nothing else ends its wait, not even Ctrl-C.
    """
    since = time.monotonic()
    while (workers := watched()) is not None and not workers.lost:
        ended = workers._ended() if workers._runs is not None else ""
        if not ended:
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            why = f"a divided target has lost its processes ({ended}), and waits for them for ever"
            print(f"headstart: {why}; this process ends.", file=sys.stderr, flush=True)
            os._exit(1)
        del workers
        time.sleep(_POLLS)


def place_of(rank: int, device: str) -> torch.device | None:
    """A process's own GPU, which its calling thread computes on from now on; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.set_device(place := torch.device("cuda", rank))
    return place


def join(store: Any, rank: int, processes: int, device: str) -> None:
    """Make this process one of those that compute together."""
    place = place_of(rank, device)
    torch.distributed.init_process_group(
        "gloo" if place is None else "nccl",
        store=store,
        rank=rank,
        world_size=processes,
        timeout=_LATE,
        device_id=place,
    )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until this has ended; Python hands it to the main thread alone."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[Any] = []
    signal.signal(signal.SIGINT, lambda *how: held.append(how))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
