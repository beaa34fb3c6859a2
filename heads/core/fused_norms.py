"""Norms as one launch each, and with the sum that they are of.

A decoder layer adds what its attention and its gated layers give to the states that came in, and
the next thing that happens to each sum is a norm: the layer's second one, the next layer's first
one, or the model's last one. One kernel computes the sum and that norm of it. The norm's answer
waits until its module is called with that very sum, as it is; a module that is called with anything
else computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .cache_name import CACHE
from .fused_writes import kernels_for
from .trial import nearly_equal, random_numbers

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")  # as transformers calls them
_PARTS = {*LAYER_NORMS, "self_attn", "mlp"}
_GIVEN = (
    "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings", "more",
)  # fmt: skip


@torch.library.custom_op("headstart::rms_norm", mutates_args=())
def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """States [..., D] over their root mean square, times weight [D]; in float32, as Llama's."""
    if (kernels := kernels_for(states)) is not None:
        return kernels.rms_norm(states, weight, eps)
    wide = states.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


@torch.library.custom_op("headstart::add_norm", mutates_args=())
def add_norm(states: Tensor, others: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two tensors [..., D] of one dtype, and `rms_norm` of it."""
    if (kernels := kernels_for(states)) is not None:
        return kernels.add_norm(states, others, weight, eps)
    total = states + others
    return total, rms_norm(total, weight, eps)


def eps_of(norm: Any) -> Any:
    """What a norm adds to the mean square; None for modules that say nothing of it."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


class Sums:
    """What one forward of a thread has computed for a norm whose module is called next."""

    def __init__(self) -> None:
        self._ready: tuple[nn.Module, Tensor, int, Tensor] | None = None

    def add(self, states: Tensor, others: Tensor, norm: Any) -> Tensor:
        """The sum, after which a norm comes; None for none that is known."""
        if norm is None or states.shape != others.shape:
            return states + others
        if not _kind(states) == _kind(others) == _kind(norm.weight):
            return states + others
        total, normed = add_norm(states, others, norm.weight, eps_of(norm))
        self._ready = norm, total, total._version, normed
        return total

    def take(self, norm: nn.Module, states: Tensor) -> Tensor | None:
        """What a norm gives for states, where that is known."""
        found, self._ready = self._ready, None
        if found is None or found[0] is not norm or found[1] is not states:
            return None
        return found[3] if states._version == found[2] else None


def run_layer(
    layer: Any, following: Any, sums: Sums, hidden_states: Tensor, **options: Any
) -> Tensor:
    """A decoder layer as Llama's, whose sums are computed with the norms that come after them.

    Args:
        following: the norm after the layer; None where none is known.
    """
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    states = sums.add(hidden_states, attended, layer.post_attention_layernorm)
    return sums.add(states, layer.mlp(layer.post_attention_layernorm(states)), following)


class _Given(nn.Module):
    """In the place of a part of a layer: says what it was given, and answers with other states."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._answer, self.seen = answer, list[Any]()

    def forward(self, *states: Tensor, **options: Any) -> Any:
        given = states[0] if states else options.pop("hidden_states")
        self.seen.append((len(states), options))
        return self._answer(given)


def is_as_llamas(layer: Any) -> bool:
    """Whether a decoder layer does what `run_layer` does, and its norms what `add_norm` does.

    It is tried with stand-ins for all its parts but the norms. Its attention must be handed all
    that the layer is given.
    """
    if layer._modules.keys() != _PARTS:
        return False
    norm, given = layer.post_attention_layernorm, {name: object() for name in _GIVEN}
    size, (dtype, device) = len(norm.weight), _kind(norm.weight)
    states, others = (
        random_numbers(1, 3, size, dtype=dtype, seed=seed).to(device) for seed in range(2)
    )
    found, seen = [], []
    for run in (type(layer).forward, lambda *a, **k: run_layer(a[0], None, Sums(), *a[1:], **k)):
        stand_in = copy.copy(layer)
        attention, gated = _Given(lambda x: (1 - x, None)), _Given(lambda x: x * x)
        stand_in._modules = {**layer._modules, "self_attn": attention, "mlp": gated}
        try:
            found.append(run(stand_in, states, **given))
        except Exception:  # it takes other arguments, or its parts answer otherwise
            return False
        seen.append([attention.seen, gated.seen])
    if not isinstance(found[0], Tensor) or not torch.equal(*found) or seen[0] != seen[1]:
        return False
    total, normed = add_norm(states, others, norm.weight, eps_of(norm))
    return torch.equal(total, states + others) and nearly_equal(norm(total), normed)
