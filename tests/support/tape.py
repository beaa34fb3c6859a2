"""A CUDA graph for the CPU: operations are recorded once and then repeated on the same addresses.

What a graph cannot do shows here too: no Python runs again, what the host knew is built in, and a
tensor that the work made anew is written where it lay when it was recorded. Memory that was there
before is only looked up again, as a graph knows addresses alone: where it is gone by then,
`DeadMemory` is raised. So is it where one record reads what another one made and nobody holds any
more: graphs share a pool, and give each other such memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.infer import Speculator
from headstart.infer.capture import CudaCapture
from headstart.infer.graphs import RoundGraphs
from tests.support.families import LENGTHS
from tests.support.tiny import prompts

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
"""Reads of the device by the host, which no graph holds."""
NEW = 24
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.8}


class DeadMemory(AssertionError):
    """A replay uses memory that was there when it was recorded, and is gone."""


class Own:
    """Memory that a record made: its own for good, and everybody else's while somebody holds it."""

    def __init__(self, storage: torch.UntypedStorage):
        self._held: Any = storage
        self._seen, self._size = StorageWeakRef(storage), storage.nbytes()

    def let_go(self) -> None:
        """Hold it no longer: the recording has ended."""
        self._held = None

    @property
    def held(self) -> bool:
        """Whether it is the record's for good, since nobody else held it at a replay."""
        return self._held is not None

    def storage(self) -> Any:
        """Where others look for it, or some of the same size where nobody does."""
        if self._held is None:
            found = torch.UntypedStorage._new_with_weak_ptr(self._seen.cdata)
            if found is not None:
                return found
            self._held = torch.UntypedStorage(self._size)
        return self._held


class Place:
    """Where a tensor lay: in memory that the record made, or in some from outside."""

    def __init__(self, tensor: Tensor, memory: Own | StorageWeakRef, what: str):
        self._memory, self._what, self._dtype = memory, what, tensor.dtype
        self._where = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._held: Tensor | None = None
        self.key = id(memory), self._dtype, self._where

    def tensor(self) -> Tensor:
        """What lies there now."""
        if self._held is not None:
            return self._held
        if isinstance(self._memory, Own):
            storage = self._memory.storage()
        else:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if storage is None:
            size = tuple(self._where[1])
            raise DeadMemory(f"{size} of {self._dtype}, which {self._what} uses, is gone")
        found = torch.empty(0, dtype=self._dtype).set_(storage, *self._where)
        if isinstance(self._memory, Own) and self._memory.held:
            self._held = found  # the memory stays, and so may the tensor
        return found


@dataclass
class _Call:
    function: Any
    args: tuple[Any, ...]  # tensors as places
    kwargs: dict[str, Any]
    outputs: list[Place]

    def repeat(self, there: dict[Place, Tensor]) -> None:
        kwargs = {name: _there(value, there) for name, value in self.kwargs.items()}
        found = self.function(*[_there(value, there) for value in self.args], **kwargs)
        for place, new in zip(self.outputs, _tensors(found), strict=True):
            old = _there(place, there)
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.own: dict[int, Own] = {}  # storages that were made meanwhile, by their addresses
        self._outside: dict[int, StorageWeakRef] = {}
        self._places: dict[Any, Place] = {}  # those of one tensor are one

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        # A single number is built into a kernel's call; more of the host's data would be copied.
        constant = name == "lift_fresh"
        if name in READS or (constant and args[0].dim() > 0):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if constant:
            self._keep(args[0])
        if _is_view(function):
            return function(*args, **kwargs)
        placed = self._placed(args, name)
        named = {key: self._placed(value, name) for key, value in kwargs.items()}
        found = function(*args, **kwargs)
        for tensor in _tensors(found):
            self._keep(tensor)
        outputs = [self._place(tensor, name) for tensor in _tensors(found)]
        self.calls.append(_Call(function, placed, named, outputs))
        return found

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._outside and storage._cdata not in self.own:
            self.own[storage._cdata] = Own(storage)

    def _placed(self, value: Any, name: str) -> Any:
        """A value with places for its tensors."""
        if isinstance(value, Tensor):
            return self._place(value, name)
        if type(value) in (list, tuple):
            return type(value)(self._placed(each, name) for each in value)
        return value

    def _place(self, tensor: Tensor, name: str) -> Place:
        storage = tensor.untyped_storage()
        memory: Own | StorageWeakRef | None = self.own.get(storage._cdata)
        if memory is None:
            memory = self._outside.setdefault(storage._cdata, StorageWeakRef(storage))
        place = Place(tensor, memory, name)
        return self._places.setdefault(place.key, place)


class Tape:
    """Records work; `taped` counts how often, `replayed` how often it was repeated."""

    def __init__(self) -> None:
        self.taped = self.replayed = 0

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        record = _Record()
        with record:
            work()
        for memory in record.own.values():
            memory.let_go()
        self.taped += 1
        calls = record.calls

        def replay() -> None:
            self.replayed += 1
            there: dict[Place, Tensor] = {}  # looked up once a replay, and held no longer
            for call in calls:
                call.repeat(there)

        return replay


class Living:
    """Captures by another way, such as a CUDA graph, and raises `DeadMemory` before a replay that
    would read memory which was there when it was captured and is gone.

    What no dispatch mode sees, a kernel that is launched past torch's operators, is not watched.
    """

    def __init__(self, capture: Callable[[Callable[[], Any]], Callable[[], Any]]):
        self.capture, self.taped, self.replayed = capture, 0, 0

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        outside = _Outside()

        def watched() -> None:
            with outside:
                work()

        repeat = self.capture(watched)
        self.taped += 1

        def replay() -> None:
            self.replayed += 1
            for name, size, storage in outside.found.values():
                if storage.expired():
                    raise DeadMemory(f"{size} bytes, which {name} uses, are gone")
            repeat()

        return replay


class _Outside(TorchDispatchMode):
    """Notes the memory that work reads and did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[str, int, StorageWeakRef]] = {}
        self._made: dict[int, Any] = {}  # held, so that nothing else gets their addresses

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, *kwargs.values())):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self.found:
                seen = function.overloadpacket.__name__, storage.nbytes(), StorageWeakRef(storage)
                self.found[storage._cdata] = seen
        made = function(*args, **kwargs)
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.found:
                self._made[storage._cdata] = storage
        return made


def _is_view(function: Any) -> bool:
    """Whether all that is returned are views, which hold what their base holds."""
    aliases = [entry.alias_info for entry in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _there(value: Any, there: dict[Place, Tensor]) -> Any:
    """An argument with what lies at its places now, which `there` keeps for others."""
    if type(value) is Place:
        if value not in there:
            there[value] = value.tensor()
        return there[value]
    if type(value) in (list, tuple):
        return type(value)(_there(each, there) for each in value)
    return value


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    values = found if isinstance(found, (list, tuple)) else ()
    return [leaf for value in values for leaf in _tensors(value)]


def on_tape(speculator: Speculator, capture: Callable | None = None) -> Any:
    """Give the speculator a tape in place of graphs; on a GPU, graphs that are watched."""
    tape = Tape() if speculator.device.type == "cpu" else Living(CudaCapture(speculator.device))
    speculator.graphs = RoundGraphs(capture or tape)
    return tape


def decode(speculator: Speculator, batch: int = 4, turn: int = 0, **options: Any) -> Tensor:
    texts = prompts([length + turn for length in LENGTHS[:batch]])
    ids, mask = (each.to(speculator.device) for each in texts)
    given: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False} | options
    if given["do_sample"]:
        given["seed"] = [11 + turn, 12, 13, 14 + turn][:batch]
    return speculator.generate(ids, attention_mask=mask, **given)
