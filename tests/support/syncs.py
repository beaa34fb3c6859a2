"""A dispatch mode that fails where the host would wait for the device.

On the CPU a read shows as an operator that copies a scalar or whose result's shape depends on data.
`no_grad`, not `inference_mode`: the latter hides these operators from a dispatch mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.infer import Decoding

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal"}
READS |= {"unique_dim", "_unique2", "unique_consecutive", "nonzero_numpy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Synchronised(AssertionError):
    """An operator that would wait for the device."""


class NoSync(TorchDispatchMode):
    """Fails on every operator that the host must wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
        if name in READS or by_mask:
            raise Synchronised(str(func))
        return func(*args, **(kwargs or {}))


WARPERS = [
    TemperatureLogitsWarper(0.8),
    TopKLogitsWarper(20),
    TopPLogitsWarper(0.9),
    MinPLogitsWarper(0.01),
]


def run_rounds(decoding: Decoding, watch: Callable[[], Any] = NoSync) -> int:
    """All rounds, the first included, each under the mode; how many."""
    rounds = 0
    while not decoding.finished:
        with watch():
            decoding.round()
        rounds += 1
    return rounds
