"""A target whose layers are divided among processes (tensor parallelism), each on a GPU of its own.

The process that loads it leads: it drafts, accepts, and keeps the text. It starts the others, which
run the target's forwards with it, and tells them through a pipe each what they run; so all do the
same in the same order, whatever it decides:

    leader    load   Target   prefill   verify   commit   verify   …
    workers   load   Target   prefill   verify   commit   verify   …

A worker ends with its pipe, so none outlives the leader. See `tensor_parallel_worker`.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from headstart.heads import DecodingError, HeadstartError, OptionError, SlabCache, TokenTree
from headstart.heads.core import (
    CACHE,
    brief,
    counted,
    decoder_of,
    load_pretrained,
    options_in_parts,
    physical_cores,
)
from headstart.heads.core.offload import NOT_READ

from .sent import receive, send
from .target import AUTO, Target, way_to_run

_WORKER = "headstart.infer.tensor_parallel_worker"
_LATE = timedelta(hours=2)  # after which a process counts as lost; loading may take long
_REORDERS = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")

_numbers = itertools.count()  # of what the workers keep: models, targets and caches


class Workers:
    """The other processes, which run what they are told to.

    Args:
        processes: with this one; device: `cuda`, where each has a GPU of its own, or `cpu`.

    Attributes:
        lost: why they cannot be told anything any more; empty while they can.

    Raises:
        DecodingError: one of them ends before it is ready.
    """

    def __init__(self, processes: int, device: str):
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
        join(self._store, 0, processes, device)

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs what the others run, too."""
        return self._runs == threading.get_ident()

    @contextmanager
    def together(self, *what: Any) -> Iterator[None]:
        """What is run meanwhile, the workers run as well, by that name; nothing within is told.

        Ctrl-C waits until it has ended: a forward that is cut off leaves the others waiting.

        Raises:
            DecodingError: a process has ended.
        """
        with self._lock:
            if self.inside:
                yield
                return
            with _without_interrupts():
                self._tell(*what)
                self._runs = threading.get_ident()
                try:
                    yield
                except (HeadstartError, torch.OutOfMemoryError):
                    raise  # which the others meet as well
                except Exception as error:
                    raise self._broken(error) from error
                finally:
                    self._runs = None

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

    def number(self, kept: Any) -> int:
        """A number for what the workers keep one of as well, as long as `kept` is there."""
        weakref.finalize(kept, self._drop, number := next(_numbers))
        return number

    def _drop(self, number: int) -> None:
        self._dropped.append(number)  # told with what comes next, not from a garbage collection

    def _broken(self, error: Exception) -> DecodingError:
        """The error for processes that do not run the same any more; it ends them."""
        why = brief(error) or type(error).__name__
        for number, each in enumerate(self._started, 1):
            with suppress(subprocess.TimeoutExpired):
                why = f"process {number} ended with status {each.wait(1)}"
                break
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
                each.wait(2)
            except subprocess.TimeoutExpired:
                each.kill()
            cast("Any", each.stdout).close()
        with suppress(Exception):  # whatever a group says whose other processes have gone
            torch.distributed.destroy_process_group()


def join(store: Any, rank: int, processes: int, device: str) -> None:
    """Make this process one of those that compute together."""
    place = torch.device("cuda", rank) if device == "cuda" else None
    if place is not None:
        torch.cuda.set_device(place)
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


_workers: Workers | None = None


def check_in_parts(
    processes: int, by_name: bool, device: Any, options: Mapping[str, Any], ways: Mapping[str, Any]
) -> None:
    """Refuse what `load` is given beside `tensor_parallel`, before anything is loaded.

    Args:
        ways: to run that it has not, which are refused where they are asked for.

    Raises:
        OptionError: a model that is loaded already, a place for it, too few GPUs, or another number
            of processes than runs already.
    """
    if not by_name:
        raise OptionError(
            f"tensor_parallel is {processes}, and the target is a model that is loaded already; "
            "give its folder or Hub name."
        )
    if device is not None or "device_map" in options:
        raise OptionError(
            "tensor_parallel puts a part of the target on each of the first GPUs, and device or "
            "device_map says where all of it is; leave that out."
        )
    if asked := [name for name, value in ways.items() if value not in (None, False, AUTO)]:
        raise OptionError(
            f"{asked[0]} is {ways[asked[0]]!r}, and the target is divided among processes, where "
            f"transformers runs its layers; leave {asked[0]} out."
        )
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise OptionError(
            f"tensor_parallel is {processes}, and torch finds {counted(gpus, 'GPU')} here; take no "
            "more processes than there are GPUs."
        )
    if _workers is not None and not _workers.lost:
        if _workers.processes != processes:
            raise OptionError(
                f"tensor_parallel is {processes}, and this process has a target that is divided "
                f"among {_workers.processes} processes; take as many, or load it in a process of "
                "its own."
            )
    elif "RANK" in os.environ or torch.distributed.is_initialized():
        raise OptionError(
            "tensor_parallel starts the other processes itself, and this one is of a group that a "
            "launcher has started; start a single process, without torchrun or accelerate launch."
        )


def load_in_parts(name: Any, processes: int, **options: Any) -> PreTrainedModel:
    """Load a target whose layers are divided among so many processes, on the first GPUs.

    Without a GPU they share the CPU, which is for trying it out. See `check_in_parts`.

    Args:
        name: its folder or Hub name.
        options: of `from_pretrained`.

    Raises:
        OptionError: transformers has no plan for it, or its heads cannot be divided so.
        DecodingError: a process has ended.
    """
    global _workers
    found = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    otherwise = "spread it over the GPUs of one process with device_map='auto'"
    options |= options_in_parts(name, "auto", processes, "tensor_parallel", otherwise, **found)
    if _workers is None or _workers.lost:
        _workers = Workers(processes, "cuda" if torch.cuda.is_available() else "cpu")
    workers, number = _workers, next(_numbers)
    with workers.together("load", number, str(name), options):
        try:
            model = load_pretrained(AutoModelForCausalLM, name, **options).eval()
        finally:
            workers.answers()
    weakref.finalize(model, workers._drop, number)
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            setattr(weight, NOT_READ, True)
    model._headstart_led = Led(workers, number)
    for decoder, runs in ((False, model), (True, decoder_of(model))):
        runs.forward = _led_forward(model._headstart_led, decoder, runs.forward)
    return model


class Led:
    """A divided model's part in this process, and the workers that have the others.

    Args:
        number: of the model, as the workers know it.
    """

    def __init__(self, workers: Workers, number: int):
        self.workers, self.number = workers, number

    def __deepcopy__(self, memo: Any) -> Led:
        return self

    def cache_number(self, cache: Any) -> int | None:
        """That of a cache which `generate` made; the workers have one of their own for it.

        Raises:
            OptionError: a cache of another kind.
        """
        if cache is None:
            return None
        if type(cache) is not DynamicCache:
            raise OptionError(
                f"found a {type(cache).__name__} for a target that is divided among processes; "
                "expected a DynamicCache: leave cache_implementation out."
            )
        own: Any = cache
        if not hasattr(own, "_headstart_number"):
            own._headstart_number = self.workers.number(own)
            for name in _REORDERS:
                setattr(own, name, _refuse)
        return own._headstart_number


def _refuse(*args: Any, **options: Any) -> None:
    raise OptionError(
        "a target that is divided among processes keeps each row's cache in its place; expected "
        "greedy decoding or sampling: leave num_beams out."
    )


def _led_forward(led: Led, decoder: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model, or of its decoder, which the workers run as well."""

    @functools.wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        if led.workers.inside:
            return forward(*args, **options)
        cache, others = options.get(CACHE), {k: v for k, v in options.items() if k != CACHE}
        number = led.cache_number(cache)
        length = 0 if cache is None else cache.get_seq_length()
        told = led.number, decoder, number, length, args, others
        with led.workers.together("forward", *told):
            return forward(*args, **options)

    return run


def leads(model: PreTrainedModel) -> bool:
    """Whether a model is divided among processes of which this one leads the others."""
    return hasattr(model, "_headstart_led")


def runner_of(model: PreTrainedModel, *args: Any, **options: Any) -> Target:
    """The `Target` that runs a model's forwards, and has the workers run those of a divided one."""
    if (led := getattr(model, "_headstart_led", None)) is None:
        return Target(model, *args, **options)
    return LedTarget(led, model, *args, **options)


class LedTarget(Target):
    """A divided target: what this process runs of it, the others run as well."""

    def __init__(
        self,
        led: Led,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        attention: str = "auto",
        compile: bool | str = False,
        fused: bool | None = None,
    ):
        way_to_run(model, compile)  # what is refused here alone, before the others are told
        if fused:
            raise OptionError(
                "fused is True, and the target is divided among processes, where transformers runs "
                "its layers; leave fused out."
            )
        self._workers = led.workers
        self._number = self._workers.number(self)
        with self._workers.together("target", self._number, led.number, attention):
            super().__init__(model, feature_layers, attention, compile, fused=False)

    def spare(self) -> Target:
        found = copy.copy(self)
        found._number = self._workers.number(found)
        with self._workers.together("spare", found._number, self._number):
            found.cache = SlabCache(self.shapes, 0, 0)
        return found

    def prefill(
        self, tokens: Tensor, counts: Sequence[int], capacity: int
    ) -> tuple[Tensor, Tensor]:
        with self._together("prefill", tokens, counts, capacity):
            return super().prefill(tokens, counts, capacity)

    def prefill_apart(
        self, tokens: Tensor, counts: Sequence[int], kept: Sequence[int]
    ) -> tuple[SlabCache, Tensor]:
        number = next(_numbers)
        with self._workers.together("apart", number, self._number, tokens, counts, kept):
            apart, features = super().prefill_apart(tokens, counts, kept)
        weakref.finalize(apart, self._workers._drop, number)
        apart._headstart_number = number  # type: ignore[attr-defined]
        return apart, features

    def verify(
        self, tree: TokenTree, lengths: Tensor, longest: int, even: bool = False
    ) -> tuple[Tensor, Tensor]:
        shape = tree.topology
        own = shape.parents, shape.max_depth, shape.width, shape.children
        told = self._number, tree.tokens, own, lengths, longest, even
        with self._workers.together("verify", *told):
            return super().verify(tree, lengths, longest, even)

    def resize(self, batch: int, capacity: int) -> None:
        with self._together("resize", batch, capacity):
            super().resize(batch, capacity)

    def reserve(self, slots: int) -> int:
        with self._together("reserve", slots):
            return super().reserve(slots)

    def adopt(self, other: SlabCache, rows: Tensor, slots: int) -> None:
        number = other._headstart_number  # type: ignore[attr-defined]
        with self._workers.together("adopt", self._number, number, rows, slots):
            super().adopt(other, rows, slots)

    def release(self) -> None:
        with self._together("release"):
            super().release()

    def commit(self, path: Tensor, in_place: bool = False) -> None:
        with self._together("commit", path, in_place):
            super().commit(path, in_place)

    def _together(self, method: str, *args: Any) -> Any:
        return self._workers.together("call", self._number, method, *args)
