"""A GPU that is pretended: tensors that say they are there, and are as strict as if they were.

Their numbers lie in memory of the CPU. An operator that mixes them with tensors of the CPU fails as
it does on a GPU, and what a graph cannot hold fails while one is captured. The kernels' definitions
stand in for the kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads.core import cache, tree_attention, triton_here
from headstart.infer import graphs
from tests.support.syncs import INDEXING, READS

DEVICE = torch.device("cuda", 0)

_ACROSS = {"copy_", "_to_copy"}
"""What takes tensors of both the CPU and the GPU."""
_BY_INDEX = {"index_select", "gather", "scatter", "index_copy", "index_fill", "index_add"}
"""What takes no index of the CPU, not even a single number."""


class Mixed(RuntimeError):
    """Tensors of the CPU and of the GPU in one operator."""


class Refused(RuntimeError):
    """What no graph can hold."""


class Pretended(Tensor):
    """A tensor on the GPU that is pretended.

    The methods here are those in which torch asks for the device before any of it is dispatched,
    which a build for CPUs does not know.

    Attributes:
        numbers: its own, in memory of the CPU.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Pretended:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device=DEVICE,
            storage_offset=numbers.storage_offset(),
        )  # fmt: skip
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        return f"Pretended({self.numbers!r})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()

    def __getitem__(self, place: Any) -> Any:
        return Pretended(self.numbers[_checked(place)])

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, Pretended):
            _wait("a copy from the CPU")
        self.numbers[_checked(place)] = getattr(value, "numbers", value)

    def contiguous(self, **options: Any) -> Tensor:  # type: ignore[override]
        given = options or {"memory_format": torch.contiguous_format}
        return self if self.numbers.is_contiguous() else self.clone(**given)

    def copy_(self, other: Any, non_blocking: bool = False) -> Tensor:
        return _run(torch.ops.aten.copy_.default, (self, other), {})

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def nonzero(self, **options: Any) -> Tensor:  # type: ignore[override]
        assert not options
        return torch.ops.aten.nonzero.default(self)

    def item(self) -> Any:
        return torch.ops.aten._local_scalar_dense.default(self)

    __int__ = __float__ = __bool__ = item  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()


class _OfThread(threading.local):
    """What a thread does now."""

    def __init__(self) -> None:
        self.captures = False


_now = _OfThread()


class Gpu(TorchDispatchMode):
    """While this lasts, `cuda` is the GPU that is pretended, for the thread that enters it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator, on the numbers."""
    name, asked = function.overloadpacket.__name__, kwargs.get("device")
    goes = None if asked is None else torch.device(asked).type
    there, here = list[Pretended](), list[Tensor]()

    def numbers(value: Any) -> Any:
        if isinstance(value, Pretended):
            there.append(value)
            return value.numbers
        here.extend([value] if isinstance(value, Tensor) else [])
        return value

    given = _mapped(args, numbers)
    named = {key: _mapped(value, numbers) for key, value in kwargs.items()}
    # A single number of the CPU is an argument of a kernel.
    strange = [list(each.shape) for each in here if each.dim() or name in _BY_INDEX]
    if there and strange and name not in _ACROSS | INDEXING:
        raise Mixed(f"{function}: tensors {strange} of the CPU with {DEVICE}'s")
    across = name == "_to_copy" and goes is not None and (goes == "cuda") != bool(there)
    if across or (there and (name in READS or (name == "copy_" and here))):
        _wait(str(function))
    if there and name in INDEXING:
        _checked(args[1])
    named |= {} if asked is None else {"device": torch.device("cpu")}
    named |= {"pin_memory": False} if named.get("pin_memory") else {}
    found = function(*given, **named)
    to_cpu = goes == "cpu" or (name == "copy_" and not isinstance(args[0], Pretended))
    if to_cpu or not (there or goes):
        return found
    known = {id(each.numbers): each for each in there}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else Pretended(value)

    return _mapped(found, placed)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """What a function makes of each value in lists and tuples."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return function(value)


def _checked(place: Any) -> Any:
    """What a tensor is indexed with, on the CPU."""

    def checked(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, Pretended):
            _wait("an index of the CPU")
        elif isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
            _wait("an index that is a mask")
        return getattr(value, "numbers", value)

    return _mapped(place, checked)


def _wait(what: str) -> None:
    if _now.captures:
        raise Refused(f"operation not permitted when stream is capturing: {what}")


class StrictCapture:
    """Runs work under the rules of a capture; what repeats it runs it again, under the same, and
    writes the tensors that it returned first."""

    def __init__(self) -> None:
        self.taped = self.replayed = 0

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> list[Tensor]:
            _now.captures = True
            try:
                return [each for each in tree_leaves(work()) if isinstance(each, Tensor)]
            finally:
                _now.captures = False

        def replay() -> None:
            self.replayed += 1
            for old, new in zip(first, run(), strict=True):
                old.copy_(new)

        self.taped += 1
        first = run()
        return replay


class _Event:
    """A mark in the work, which is done as soon as it is told."""

    def __init__(self, **options: bool):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Any) -> float:
        return 1.0


def moved_there(module: Any) -> Any:
    """The module, its weights and buffers put on the GPU that is pretended."""
    moved: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and id(weight) not in moved:
                moved[id(weight)] = nn.Parameter(Pretended(weight.detach()), False)
            part._parameters[name] = None if weight is None else moved[id(weight)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else Pretended(buffer.detach())
    return module


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictCapture]:
    """While this lasts, there is a GPU; yields what captures its rounds."""
    from headstart.heads.core import kernels

    def free(device: Any = None) -> tuple[int, int]:
        return 1 << 33, 1 << 33

    for name, value in {
        "_lazy_init": lambda: None, "current_device": lambda: 0, "Event": _Event,
        "device": lambda device: nullcontext(), "current_stream": lambda device: None,
        "mem_get_info": free, "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0, "get_device_capability": lambda device: (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with torch.device("cpu"):  # what such contexts put in place is remembered for good: torch's own
        torch.empty(0)
    for name in ("tensor", "as_tensor"):  # they move what they have made past all modes
        monkeypatch.setattr(torch, name, _then_moved(getattr(torch, name)))
    monkeypatch.setattr(kernels, "split_attention", tree_attention.plain_attention)
    monkeypatch.setattr(kernels, "move_path", cache.plain_move)
    capture = StrictCapture()
    monkeypatch.setattr(graphs, "capture_on", lambda device: capture)
    known = triton_here.no_kernel, triton_here.no_triton  # they remember what there is
    for each in known:
        each.cache_clear()
    try:
        with Gpu():
            yield capture
    finally:
        for each in known:
            each.cache_clear()


def _then_moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found = data.to(**options) if isinstance(data, Pretended) else make(data, **options)
        return found if device is None else found.to(device)

    return made
