"""Linear layers in oneDNN's own layout, for decoding on a CPU.

A product with few rows is bound by reading the weight. oneDNN reads one fastest in blocks that fit
its registers, and torch lays a weight out so anew, or not at all, in each call. A packed copy is
laid out once, and serves any number of rows.

A model that somebody else holds is never changed: a packed copy shares all of it but the packed
weights.
"""

import copy
import logging
from collections.abc import Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

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

_LEAST = {torch.float32: 192 << 10, torch.bfloat16: 32 << 10, torch.float16: 32 << 10}
"""Bytes of the smallest weight that is packed: a call costs about 10 µs more than torch's own."""

_ROWS = 16
"""Rows that a layout is chosen for: those of a tree. Others are only a little slower with it."""

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
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], without a gradient."""
        return _product(input, self._packed, self.bias, "none", [], "")


def packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is one that packing makes faster here, and is exactly torch's own."""
    if type(layer) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight: Any = layer.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not plain or weight.dtype not in _NEEDS or weight.nbytes < _LEAST[weight.dtype]:
        return False
    return bool(_NEEDS[weight.dtype]())


class Packing:
    """Packed copies of models that may call each other's layers, as drafters do their target's."""

    def __init__(self) -> None:
        self._copies: dict[Any, Any] = {}  # what stands for an object, by its id, as in deepcopy
        self._exact: dict[tuple[Any, ...], bool] = {}

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
        size = sum(layer.weight.nbytes for layer in layers)
        logger.info("Packing %.0f MB of weights, beside the model's own.", size / 1e6)
        for layer in layers:
            packed = PackedLinear(layer)
            kind = (layer.weight.dtype, *layer.weight.shape)
            if kind not in self._exact:
                self._exact[kind] = _is_as_exact(packed, layer)
            if self._exact[kind]:
                self._copies[id(layer)] = packed
        self._copies.update((id(each), each) for each in _shared(model))
        return copy.deepcopy(model, self._copies)


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


def _is_as_exact(packed: PackedLinear, layer: nn.Linear) -> bool:
    """Whether a packed layer is no further from float64 than torch's own, over made-up rows."""
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(8, layer.in_features, generator=draws).to(layer.weight.dtype)
    some = slice(0, 512)  # outputs that are compared
    bias = None if layer.bias is None else layer.bias[some].double()
    with torch.no_grad():
        true = nn.functional.linear(rows.double(), layer.weight[some].double(), bias)
        errors = [
            (each(rows)[:, some].double() - true).square().mean().sqrt().item()
            for each in (packed, layer)
        ]
    return errors[0] <= _SLACK * errors[1]
