"""Linear layers by our kernels or in oneDNN's own layout, for decoding on a CPU.

A product with few rows is bound by reading the weight. The kernels of `cpu_kernels` are fastest,
and read it as it is. Where there are none a layer is packed for oneDNN, which reads a weight
fastest in blocks that fit its registers: torch lays it out so anew, or not at all, in each call. A
packed copy is laid out once, and serves any number of rows. What is neither stays torch's own.

A model that somebody else holds is never changed: a packed copy shares all of it but the packed
weights. One that nobody else holds is packed in place, and has each weight once.
"""

import copy
import ctypes
import itertools
import logging
import math
import operator
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeGuard, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from .cpu_kernels import CpuLinear, fits_kernels, in_huge_pages, use_huge_pages
from .offload import offloaded

logger = logging.getLogger(__name__)

_product = torch.ops.mkldnn._linear_pointwise.default
_Model = TypeVar("_Model", bound=nn.Module)

_NEEDS = {
    torch.float32: lambda: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
"""The types that oneDNN may pack, and what tells whether this processor's it can."""

_LEAST = {torch.float32: 512 << 10, torch.bfloat16: 32 << 10, torch.float16: 32 << 10}
"""Bytes of the smallest weight that is packed: a call costs about 10 µs more than torch's own,
which counts most where a small model's weights stay in the processor's cache."""

_LEAST_OF_KERNELS = {torch.float32: 64 << 10, torch.bfloat16: 32 << 10}
"""The same for kernels, whose call costs about 3 µs more, and nothing within a whole layer."""

_ROWS = 16
"""Rows that a layout is chosen for: those of a tree. Others are only a little slower with it."""

_WORTH_SAYING = 100 << 20
"""Bytes that packed copies may take without being announced."""

_MARK = "_runs_packed"  # the attribute of a model that does

_TRIED, _TURNS = 32 << 20, 8  # bytes of a trial, and how often it is timed
_TRIED_ROWS = (1, 8)

_SAVED = 1.25
"""So many times as slow as torch's own may layers be in a trial, where each is called alone: in a
forward that runs packed the calls between them are fewer too, and whole decoder layers are one."""

_TRIMMED = 16 << 20
"""Bytes of weights that are given up before the system gets them back."""

_SLACK = 3
"""A packed layer may be so many times as far from float64 as torch's own. In float32 its sums are
longer: 2.1 times was measured over 3,072 terms. In types of 16 bits there is no difference."""


class PackedLinear(nn.Linear):
    """A linear layer whose weight is also held packed; `weight` itself is shared, and not read.

    Args:
        layer: of a type that oneDNN packs on this processor, on the CPU.
    """

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.training = layer.training
        self._packed = _pack(layer.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], without a gradient."""
        return _product(input, self._packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The copy shares what is packed, which is never written."""
        memo[id(self._packed)] = self._packed
        memo[id(self)] = made = self.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class OnlyPacked(PackedLinear):
    """A linear layer whose weight is held packed alone; it is made by `pack_in_place`.

    `weight` lays it out anew in each reading, bit for bit as it was, and is no parameter. Moved to
    another type or device, or loaded from a state, the layer is torch's own again.
    """

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], a copy."""
        return self._packed.to_dense()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._packed.device

    @property
    def dtype(self) -> torch.dtype:
        """The weight's."""
        return self._packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._packed.numel() * self.dtype.itemsize

    def unpack(self) -> None:
        """Become torch's own layer."""
        weight = nn.Parameter(self.weight, requires_grad=False)
        del self.__dict__["_packed"]
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = fn(torch.empty(0, dtype=self._packed.dtype))
        if (found.dtype, found.device.type) != (self._packed.dtype, "cpu"):
            self.unpack()
            return self._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
        self.unpack()
        self._load_from_state_dict(*args)


def _return_memory() -> None:
    """Give free memory back to the system; glibc keeps it where something in use lies behind it."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):  # other C libraries have none
        library.malloc_trim(0)


_made: Any = WeakTensorKeyDictionary()  # by a weight, a reference to what was packed of it


def _packed_before(weight: Tensor) -> Tensor | None:
    """What some copy of a model holds packed of a weight."""
    return _made[weight]() if weight in _made else None


def _pack(weight: Tensor) -> Tensor:
    """A weight laid out for oneDNN; several copies of a model share it."""
    known = _packed_before(weight)
    if known is not None and torch.equal(known.to_dense(), weight):  # it may have been changed
        return known
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    _made[weight] = weakref.ref(packed)
    return packed


def packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is one that packing makes faster here, and is exactly torch's own."""
    return next(_ways(layer), None) is not None


def _ways(layer: nn.Module) -> Iterator[type[CpuLinear] | type[PackedLinear]]:
    """How a layer runs faster than torch's own, the fastest first."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return
    weight = layer.weight
    # The size first: whether there are kernels is known once they are compiled.
    if weight.nbytes >= _LEAST_OF_KERNELS.get(weight.dtype, math.inf) and fits_kernels(layer):
        yield CpuLinear
    if weight.is_cpu and onednn_packs(weight.dtype) and weight.nbytes >= _LEAST[weight.dtype]:
        yield PackedLinear


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of a type on this processor."""
    known = torch.backends.mkldnn.is_available() and dtype in _NEEDS
    return known and bool(_NEEDS[dtype]())


class Packing:
    """Packed copies of models that may call each other's layers, as drafters do their target's."""

    def __init__(self) -> None:
        self._copies: dict[Any, Any] = {}  # what stands for an object, by its id, as in deepcopy
        self._chosen: dict[tuple[Any, ...], type[CpuLinear] | type[PackedLinear] | None] = {}

    def copy(self, model: _Model) -> _Model:
        """A copy of a model that runs packed; it shares weights, buffers, config and hooks.

        What is changed in place in the others is thus changed in both. The packed weights are those
        of this moment.

        Returns:
            The model itself where nothing of it can be packed: on another device, in another type,
            or where its weights are streamed in.
        """
        layers = [layer for layer in model.modules() if packable(layer)]
        layers = [layer for layer in layers if id(layer) not in self._copies]
        if offloaded(model) or not (layers or self._copies):
            return model
        if (size := _packed_beside(layers)) >= _WORTH_SAYING:
            logger.warning(
                "Packing the weights takes %.0f MB beside the model's own; a model that "
                "headstart.load gets by name is packed in place.",
                size / 1e6,
            )
        for layer in layers:
            if (packed := self._packed(layer)) is not None:
                self._copies[id(layer)] = packed
        self._copies.update((id(each), each) for each in _shared(model))
        made = copy.deepcopy(model, self._copies)
        mark_packed(made)
        use_huge_pages(_by_kernels(made))
        return made

    def pack_in_place(self, model: nn.Module) -> None:
        """Pack a model's layers one by one; each one's own weight goes, so none is held twice.

        Where a weight is another module's too, as that of a tied embedding, it stays. Hooks, and
        who holds the layers, are as before. No gradient runs through packed layers.
        """
        if offloaded(model):
            return
        held = Counter(id(w) for part in model.modules() for w in part._parameters.values())
        freed = 0
        for layer in [layer for layer in model.modules() if packable(layer)]:
            if (packed := self._packed(layer)) is None:
                continue
            if isinstance(packed, CpuLinear):
                layer.__class__ = CpuLinear
                continue
            alone = held[id(layer.weight)] == 1
            layer._packed = packed._packed  # type: ignore[assignment]
            layer.__class__ = OnlyPacked if alone else PackedLinear
            if alone:
                freed += packed.weight.nbytes
                del packed, layer._parameters["weight"]  # freed before the next one is packed
            if freed > _TRIMMED:
                freed = 0
                _return_memory()
        # What is left may be parts of a mapped file, which stays as long as any of them does.
        for weight in model.parameters():
            if type(weight) is nn.Parameter and weight.is_cpu:
                weight.data = in_huge_pages(weight.data)
        mark_packed(model)
        _return_memory()
        use_huge_pages(_by_kernels(model))

    def _packed(self, layer: nn.Linear) -> PackedLinear | CpuLinear | None:
        """The layer as it runs from now on; None where it would err more."""
        kind = (layer.weight.dtype, *layer.weight.shape)
        if kind not in self._chosen:
            exact = (way for way in _ways(layer) if _is_as_exact(way(layer), layer))
            self._chosen[kind] = next(exact, None)
        way = self._chosen[kind]
        return None if way is None else way(layer)


def _packed_beside(layers: Iterable[nn.Module]) -> int:
    """Bytes that packed copies of layers take beside the layers' own."""
    found = [each for each in layers if packable(each) and next(_ways(each)) is PackedLinear]
    return sum(each.weight.nbytes for each in found if _packed_before(each.weight) is None)


def copy_fits(model: nn.Module) -> bool:
    """Whether a packed copy beside a model takes at most half of the memory that is free."""
    return 2 * _packed_beside(model.modules()) <= psutil.virtual_memory().available


def _by_kernels(model: nn.Module) -> Iterator[Tensor]:
    """Weights that the kernels read; those of layers that were moved to a GPU they do not."""
    layers = (part for part in model.modules() if isinstance(part, CpuLinear))
    return (layer.weight for layer in layers if layer.weight.is_cpu)


def runs_packed(model: nn.Module) -> bool:
    """Whether a model, or a part that is a model of transformers, runs packed."""
    return getattr(model, _MARK, False)


def runs_by_kernels(model: nn.Module) -> bool:
    """Whether the kernels for CPUs compute some of a model's linear layers."""
    return next(_by_kernels(model), None) is not None


def layers_run_by(model: nn.Module) -> str | None:
    """What computes a model's linear layers, as reports name it; None for torch alone."""
    packed = any(isinstance(part, PackedLinear) for part in model.modules())
    found = {"kernels": runs_by_kernels(model), "packed weights": packed}
    return " and ".join(name for name, here in found.items() if here) or None


def packing_pays(model: nn.Module) -> bool:
    """Whether a model's forwards are faster packed, by a short trial of its linear layers.

    Never where weights are streamed in. Of each kind of layer as many are packed meanwhile as fill
    `_TRIED`, so that their weights come from memory as in decoding. Packed layers and torch's own
    take turns, and the fastest turn of each layer counts: on a busy machine there is hardly one in
    which no layer waits for a core. The trial ends once two turns or more show that packing pays.
    """
    kinds: dict[tuple[Any, ...], list[nn.Linear]] = {}
    if offloaded(model):
        return False
    for layer in filter(packable, model.modules()):
        kinds.setdefault((layer.weight.dtype, *layer.weight.shape), []).append(layer)
    own, packed, states, alike = [], [], [], []  # of each call, and the layers that it stands for
    for (dtype, _, size), layers in kinds.items():
        tried = layers[: max(1, _TRIED // layers[0].weight.nbytes)]
        ways = [next(_ways(layer))(layer) for layer in tried]
        for count in _TRIED_ROWS:
            own += tried
            packed += ways
            states += [torch.randn(count, size).to(dtype)] * len(tried)
            alike += [len(layers) / len(tried)] * len(tried)
    fastest = [[math.inf] * len(own) for _ in range(2)]  # seconds, torch's own and packed
    for turn in range(_TURNS):
        for way, calls in enumerate((own, packed)):
            fastest[way] = list(map(min, fastest[way], _seconds(calls, states)))
        taken = [sum(map(operator.mul, alike, each)) for each in fastest]
        if turn and taken[1] < _SAVED * taken[0]:
            return True
    return False


@torch.no_grad()
def _seconds(layers: Sequence[nn.Linear], states: Sequence[Tensor]) -> list[float]:
    """How long each layer takes."""
    ends = [time.perf_counter()]
    for layer, given in zip(layers, states, strict=True):
        layer(given)
        ends.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(ends)]


def mark_packed(model: nn.Module) -> None:
    """Note that a model runs packed, see `runs_packed`."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            setattr(part, _MARK, True)


def _shared(model: nn.Module) -> Iterator[Any]:
    """What a packed copy does not copy."""
    for part in model.modules():
        yield from filter(lambda each: each is not None, part._parameters.values())
        yield from filter(lambda each: each is not None, part._buffers.values())
        if (config := getattr(part, "config", None)) is not None:
            yield config
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                yield from hooks.values()


def _is_as_exact(packed: nn.Module, layer: nn.Linear) -> bool:
    """Whether a packed layer is no further from float64 than torch's own, over made-up rows.

    Torch's own sums differ with the number of rows: with few they may all but be exact.
    """
    errors = [_errors((packed, layer), count) for count in (1, 8, 40)]
    ours, own = (max(each) for each in zip(*errors, strict=True))
    return ours <= _SLACK * own


def _errors(layers: Sequence[nn.Module], count: int) -> list[float]:
    """How far from float64 layers with the weight of the last one are, over so many rows."""
    layer: Any = layers[-1]
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(count, layer.in_features, generator=draws).to(layer.weight.dtype)
    some = slice(0, 512)  # outputs that are compared
    bias = None if layer.bias is None else layer.bias[some].double()
    with torch.no_grad():
        true = nn.functional.linear(rows.double(), layer.weight[some].double(), bias)
        found = [each(rows)[:, some].double() - true for each in layers]
    return [each.square().mean().sqrt().item() for each in found]
