"""Linear layers for the few rows of a token tree; those that read the same states as one launch.

On CUDA they are the kernels of `product_kernels`, which read each layer's own weights, so none is
copied and none grows stale; elsewhere, and for more rows, torch's own products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cpu_kernels import CpuLinear
from .triton_here import has_triton

MOST_ROWS = 128
"""Rows that a kernel takes; of more, it would read the weights again for each so many."""

_TRIES = (1, 16, 64, MOST_ROWS)  # numbers of rows that are timed
_TURNS = 3
_WRITES = 16  # of 256 MB before what is timed: while they run, the host launches it


def has_kernels(tensor: Tensor) -> bool:
    """Whether a tensor is one that the kernels compute with, which sum in float32."""
    return tensor.dtype != torch.float64 and has_triton(tensor)


def _kernels(states: Tensor, most: int) -> Any:
    if not has_kernels(states) or states.numel() > most * states.shape[-1]:
        return None
    from . import product_kernels

    return product_kernels


def _each(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    given = biases or [None] * len(weights)
    return [F.linear(states, *pair) for pair in zip(weights, given, strict=True)]


@torch.library.custom_op("headstart::three_layers", mutates_args=())
def three_layers(
    states: Tensor, weights: list[Tensor], biases: list[Tensor], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What three linear layers make of the same states [..., D].

    Args:
        weights: [outputs, D] each; biases: of all three, or none.
        most: so many rows of states are left to the kernel.
    """
    if (kernels := _kernels(states, most)) is not None:
        return kernels.three_layers(states, weights, biases)
    one, two, three = _each(states, weights, biases)
    return one, two, three


@three_layers.register_fake
def _shapes_of_three(states: Tensor, weights: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    return tuple(states.new_empty(*states.shape[:-1], len(weight)) for weight in weights)


@torch.library.custom_op("headstart::one_layer", mutates_args=())
def one_layer(states: Tensor, weights: list[Tensor], biases: list[Tensor], most: int) -> Tensor:
    """What a linear layer makes of states [..., D]; arguments as of `three_layers`."""
    if (kernels := _kernels(states, most)) is not None:
        return kernels.one_layer(states, weights, biases)
    return _each(states, weights, biases)[0]


@torch.library.custom_op("headstart::gated_layers", mutates_args=())
def gated_layers(states: Tensor, weights: list[Tensor], biases: list[Tensor], most: int) -> Tensor:
    """SiLU(gate) · up of two linear layers of states [..., D]; arguments as of `three_layers`."""
    if (kernels := _kernels(states, most)) is not None:
        return kernels.gated_layers(states, weights, biases)
    gate, up = _each(states, weights, biases)
    if has_kernels(states):
        from . import fused_kernels

        return fused_kernels.gated(gate, up)
    return F.silu(gate) * up


@one_layer.register_fake
@gated_layers.register_fake
def _shape_of_one(states: Tensor, weights: list[Tensor], *rest: Any) -> Tensor:
    return states.new_empty(*states.shape[:-1], len(weights[0]))


def weights_of(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of layers that are `alike`."""
    weights = [layer.weight for layer in layers]
    return weights, [layer.bias for layer in layers if layer.bias is not None]


def alike(layers: Sequence[Any]) -> bool:
    """Whether layers are torch's own, of the same states, and nobody listens to one of them."""
    if not all(type(layer) in (nn.Linear, CpuLinear) for layer in layers):
        return False
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    first = layers[0].weight
    return all(
        type(layer.weight) is nn.Parameter
        and layer.weight.is_contiguous()
        and (layer.weight.dtype, layer.weight.device) == (first.dtype, first.device)
        and layer.weight.shape[1] == first.shape[1]
        and (layer.bias is None) == (layers[0].bias is None)
        for layer in layers
    )


def rows_together(
    together: Callable[[Tensor], object], apart: Callable[[Tensor], object], states: Tensor
) -> int:
    """For how many rows one launch of ours is no slower than torch's; 0 for none.

    On a GPU both are timed, which takes some 256 MB; launches stay torch's where these are not
    free. Elsewhere there is nothing to choose.

    Args:
        together, apart: compute the same of states [rows, D], of which one row is given.
    """
    if not has_kernels(states):
        return MOST_ROWS
    found = 0
    for rows in _TRIES:
        given = states.expand(rows, -1).contiguous()
        try:
            ours, theirs = (_milliseconds(run, given) for run in (together, apart))
        except torch.OutOfMemoryError:
            break
        if ours > theirs:
            break
        found = rows
    return found


def _milliseconds(run: Callable[[Tensor], object], states: Tensor) -> float:
    """The least of a few turns, as in a captured round: each behind writes that leave no weights in
    the GPU's cache, and that last until the host has launched all of it."""
    with torch.cuda.device(states.device):
        other = torch.empty(1 << 28, dtype=torch.uint8, device=states.device)
        run(states)
        times = []
        for _ in range(_TURNS):
            for _ in range(_WRITES):
                other.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(states)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times)
