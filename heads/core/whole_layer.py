"""Whole decoder layers of a Llama or Qwen as one call of a kernel, over a slab cache.

Between a layer's products Python and torch take as long as reading a tenth of its weights, and the
cores wait. In one call they read on. Layers are found by what they are made of, and run so where a
trial shows that they do the same.
"""

from __future__ import annotations

import copy
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cache import LayerShape, SlabCache
from .cpu_compile import kernels
from .cpu_kernels import MOST_ROWS, CpuLinear, attention_of, plain
from .few_rows import attends_in_few_rows

_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_DECODER = struct.Struct("20q4f")  # addresses, and what norms add; see `cpu_kernels.c`
_SLACK = 1.5  # the kernel may be so many times as far from float32: few numbers, much chance
_KNOWN = {"position_ids", "use_cache"}  # and what is used


class WholeLayer:
    """What a decoder layer is made of, and the call that runs it.

    Attributes:
        norms, products: of these layers, in the order of `cpu_kernels.c`; norms of heads last.
        sizes: a head's dimension, and what scores are multiplied by.
    """

    def __init__(self, layer: Any):
        self.layer, self.attention = layer, layer.self_attn
        self.norms: list[Any] = [getattr(layer, name) for name in _NORMS]
        self.norms += [getattr(layer.self_attn, name) for name in _head_norms(layer)]
        self.products: list[Any] = [getattr(layer.self_attn, name) for name in _ATTENTION]
        self.products += [getattr(layer.mlp, name) for name in _GATED]
        self._parts = [layer.self_attn, layer.mlp, *self.norms, *self.products]
        self.sizes = layer.self_attn.head_dim, layer.self_attn.scaling
        self._eps = [getattr(norm, "variance_epsilon", None) for norm in self.norms]
        self._known: list[int] = []  # addresses of weights that were found to be as they must

    @classmethod
    def of(cls, layer: Any) -> WholeLayer | None:
        """A decoder layer that is made as a Llama's or Qwen's is; None for others."""
        names = {name for name, _ in layer.named_children()}
        if names != {*_NORMS, "self_attn", "mlp"}:
            return None
        of_attention = (*_ATTENTION, *_head_norms(layer))
        for part, inner in ((layer.self_attn, of_attention), (layer.mlp, (*_GATED, "act_fn"))):
            if {name for name, _ in part.named_children()} != {*inner}:
                return None
        if not all(hasattr(layer.self_attn, name) for name in ("head_dim", "scaling", "layer_idx")):
            return None
        if layer.self_attn.head_dim % 32:
            return None
        found = cls(layer)
        if None in found._eps or any(len(e.weight) != found.sizes[0] for e in found.norms[2:]):
            return None
        return found if all(type(each) is CpuLinear for each in found.products) else None

    def run(self, states: Tensor, **options: Any) -> Tensor | None:
        """The layer's output [B, N, D]; None, with nothing done, where it does not fit."""
        return compute([self], states, **options) if self.fits(states, **options) else None

    def fits(
        self,
        states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **options: Any,
    ) -> bool:
        """Whether the kernel does what the layer would with these arguments."""
        if not isinstance(past_key_values, SlabCache) or position_embeddings is None:
            return False
        if not _KNOWN.issuperset(options) or self.attention.config._attn_implementation != "sdpa":
            return False
        key = past_key_values.places(self.attention.layer_idx)[0]
        return self._takes(states, attention_mask, position_embeddings, key)

    def _takes(
        self, states: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor], key: Tensor
    ) -> bool:
        batch, nodes = states.shape[:2]
        cos, sin = angles
        if not 0 < batch * nodes <= MOST_ROWS or not plain(states, cos, sin):
            return False
        if cos.shape != (batch, nodes, self.sizes[0]) or cos.shape != sin.shape:
            return False
        if mask is None and nodes > 1:
            return False
        if mask is not None:
            shape = (mask.shape[1], *mask.shape[2:])
            known = mask.dtype == states.dtype and mask.stride(-1) == 1
            if not known or shape != (1, nodes, key.shape[2]):
                return False
        return key.dtype == states.dtype and key.shape[0] == batch

    def addresses(self) -> list[int] | None:
        """Of what `cpu_kernels.c` reads; None where parts have hooks now, or another type."""
        for part in self._parts:
            if part._forward_hooks or part._forward_pre_hooks:
                return None
        for each in self.products:
            if type(each) is not CpuLinear:
                return None
        weights = [e._parameters["weight"].data_ptr() for e in (*self.norms, *self.products)]
        if weights != self._known or torch.is_grad_enabled():
            if not plain(*[each.weight for each in (*self.norms, *self.products)]):
                return None
            self._known = weights
        biases = [each._parameters.get("bias") for each in self.products]
        count = len(self.norms)
        found = weights[:2] + weights[count:]
        found += [0 if each is None else each.data_ptr() for each in biases]
        return found + (weights[2:count] or [0, 0])

    def packed(self, cache: SlabCache) -> bytes | None:
        """The layer as `cpu_kernels.c` is given it; None as of `addresses`."""
        if (found := self.addresses()) is None:
            return None
        key, value, _, _ = cache.places(self.attention.layer_idx)
        eps = self._eps if len(self._eps) == 4 else [*self._eps, 0.0, 0.0]
        return _DECODER.pack(*found, key.data_ptr(), value.data_ptr(), *eps)


def _head_norms(layer: Any) -> tuple[str, ...]:
    """Names of the norms of each head's query and key, as Qwen3's layers have; none elsewhere."""
    return _HEAD_NORMS if hasattr(layer.self_attn, _HEAD_NORMS[0]) else ()


def compute(
    layers: Sequence[WholeLayer],
    states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    position_embeddings: Any = None,
    **options: Any,
) -> Tensor | None:
    """What layers that are alike make of states, one after the other, of arguments that fit.

    Returns:
        [B, N, D]; None, with nothing done, where a layer is no more what it was.
    """
    packed = [each.packed(past_key_values) for each in layers]
    given = [each for each in packed if each is not None]
    if len(given) < len(layers):
        return None
    first = layers[0]
    key, value, slots, start = past_key_values.places(first.attention.layer_idx)
    (batch, nodes, width), (size, scale) = states.shape, first.sizes
    out = torch.empty_like(states)
    group = first.products[0].out_features // first.products[1].out_features
    shape = batch, key.shape[1] * group, nodes, size
    now = attention_of(shape, key, value, attention_mask, scale)
    cos, sin = position_embeddings
    kernels(states.dtype).decoder_layers(
        b"".join(given), len(given), states.data_ptr(), out.data_ptr(), width,
        first.products[4].out_features, cos.data_ptr(), sin.data_ptr(), now,
        None if slots is None else slots.data_ptr(), start, torch.get_num_threads(),
    )  # fmt: skip
    return out


class _Found(threading.local):
    """What all layers made of this thread's states, until the last one has passed it on."""

    def __init__(self) -> None:  # in each thread; compilers overlook what hides a class's own
        self.states: Tensor | None = None


class Stack:
    """Decoder layers that follow each other; the first runs all, and the others pass that on.

    Args:
        layers: of a model whose loop over them does nothing in between; else one alone.
    """

    def __init__(self, layers: list[tuple[nn.Module, WholeLayer]]):
        self.layers, self._found = layers, _Found()

    def run(self, layer: nn.Module, whole: WholeLayer, states: Tensor, options: Any) -> Any:
        """What comes out of a layer; None where it must run as it is."""
        if self._found.states is not None and states is self._found.states:
            if layer is self.layers[-1][0]:
                self._found.states = None
            return states
        self._found.states = None
        if not whole.fits(states, **options):
            return None
        if layer is self.layers[0][0] and len(self.layers) > 1 and self._unheard():
            self._found.states = compute([each for _, each in self.layers], states, **options)
            if self._found.states is not None:
                return self._found.states
        return compute([whole], states, **options)

    def _unheard(self) -> bool:
        """Whether nobody listens to a layer."""
        return not any(each._forward_hooks or each._forward_pre_hooks for each, _ in self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stack:
        memo[id(self)] = made = Stack([])
        made.layers = copy.deepcopy(self.layers, memo)
        return made


def take_whole_layers(model: nn.Module) -> int:
    """Let decoder layers of a packed model run as one call in forwards over trees; how many do.

    The first is tried on made-up states, and the others are like it: see `_is_as_exact`. Layers
    that do already are not tried again.
    """
    parts: list[Any] = list(model.modules())
    found = [(layer, WholeLayer.of(layer)) for layer in parts if "forward" not in vars(layer)]
    new = [(layer, whole) for layer, whole in found if whole is not None]
    if new and _is_as_exact(*new[0]):
        _take_all(parts, dict(new))
    return sum(map(_is_taken, parts))


@functools.cache
def _loops() -> tuple[type, ...]:
    """Models that call all layers in order, those of a type alike, and nothing in between."""
    from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

    return LlamaModel, MistralModel, Qwen2Model, Qwen3Model


def _take_all(parts: list[Any], wholes: dict[nn.Module, WholeLayer]) -> None:
    """Take decoder layers, and those together that a model of `parts` calls in order."""
    for part in parts:
        listed: Any = getattr(part, "layers", None)
        looped = type(part) in _loops() and len(listed) == part.config.num_hidden_layers
        if looped and all(layer in wholes for layer in listed) and _alike(wholes, listed):
            _take(Stack([(layer, wholes.pop(layer)) for layer in listed]))
    for layer, whole in wholes.items():
        _take(Stack([(layer, whole)]))


def _alike(wholes: dict[nn.Module, WholeLayer], layers: Sequence[nn.Module]) -> bool:
    """Whether layers are of the same type and sizes, so that they are given the same."""
    kinds = {
        (
            getattr(whole.attention, "layer_type", None),
            len(whole.norms),
            whole.sizes,
            *(each.weight.shape for each in whole.products),
        )
        for whole in (wholes[layer] for layer in layers)
    }
    return len(kinds) == 1


def _take(stack: Stack) -> None:
    for layer, whole in stack.layers:
        layer.forward = functools.partial(_either, layer, whole, stack)


def _is_taken(layer: nn.Module) -> bool:
    forward = vars(layer).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _either


def _either(
    layer: nn.Module, whole: WholeLayer, stack: Stack, states: Tensor, *args: Any, **options: Any
) -> Any:
    if not args and attends_in_few_rows():
        found = stack.run(layer, whole, states, options)
        if found is not None:
            return found
    return type(layer).forward(layer, states, *args, **options)


@torch.no_grad()
def _is_as_exact(layer: Any, whole: WholeLayer) -> bool:
    """Whether the kernel errs no more than the layer itself, over made-up states.

    Of two rows of five nodes, and then of one each that sees them without a mask. What is true is
    computed in the next wider type.
    """
    draws, own = torch.Generator().manual_seed(0), whole.norms[0].weight.dtype
    wider = torch.float32 if own == torch.bfloat16 else torch.float64
    size, heads = layer.self_attn.head_dim, whole.products[1].out_features // whole.sizes[0]
    number = layer.self_attn.layer_idx + 1
    ways: dict[str, Any] = {"own": layer, "true": _widened(layer, wider), "whole": whole.run}
    caches = {}
    for name in ways:
        shape = LayerShape(
            torch.device("cpu"), wider if name == "true" else own, (heads, size), (heads, size)
        )
        caches[name] = SlabCache([shape] * number, 2, 64)
    errors = []
    for first, nodes in ((0, 5), (5, 1)):
        states = torch.randn(2, nodes, whole.products[0].in_features, generator=draws)
        angles = torch.rand(2, nodes, size // 2, generator=draws).repeat(1, 1, 2) * 6
        later = torch.ones(nodes, 64).triu(1 + first)[None, None] * -1e9
        found = {}
        for name, way in ways.items():
            dtype = caches[name].dtype
            live = 64 if nodes > 1 else first + 1
            caches[name].set_slots(range(first, first + nodes), live)
            found[name] = way(
                states.to(own).to(dtype),
                attention_mask=later.to(dtype) if nodes > 1 else None,
                past_key_values=caches[name],
                position_embeddings=tuple(
                    each.to(own).to(dtype) for each in (angles.cos(), angles.sin())
                ),
            )
            if found[name] is None:
                return False
        true = found.pop("true")
        errors.append([(found[name].to(wider) - true).norm().item() for name in ("whole", "own")])
    return all(ours <= _SLACK * own for ours, own in errors)


def _widened(layer: Any, dtype: torch.dtype) -> Any:
    """A copy in a wider type, also within its norms, which transformers computes in float32."""
    made = copy.deepcopy(layer).to(dtype)
    parts = [(made, name) for name in _NORMS]
    parts += [(made.self_attn, name) for name in _head_norms(layer)]
    for part, name in parts:
        own = getattr(part, name)
        norm = nn.RMSNorm(len(own.weight), own.variance_epsilon, dtype=dtype)
        norm.weight = own.weight
        setattr(part, name, norm)
    return made
