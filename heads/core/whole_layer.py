"""Whole decoder layers of a Llama, Qwen or EAGLE as one call of a kernel, over a slab cache.

Between a layer's products Python and torch take as long as reading a tenth of its weights, and the
cores wait. In one call they read on. Layers are found by what they are made of, and run so where a
trial shows that they do the same.
"""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cache import SlabCache
from .cache_name import CACHE
from .cpu_compile import kernels
from .cpu_kernels import MOST_ROWS, CpuLinear, attention_of, plain
from .few_rows import attends_in_few_rows
from .fused_norms import LAYER_NORMS
from .layer_shape import LayerShape

_HEAD_NORMS = ("q_norm", "k_norm")
_SECOND_NORM = "hidden_norm"  # of EAGLE-3's layer, which reads an embedding and a hidden state
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_DECODER = struct.Struct("22q5f4x")  # see `cpu_kernels.c`
_SLACK = 1.5  # the kernel may be so many times as far from float32: few numbers, much chance
_KNOWN = {"position_ids", "use_cache"}  # and what is used


class WholeLayer:
    """What a decoder layer is made of.

    Attributes:
        norms, products: of these layers, in the order of `cpu_kernels.c`. A norm that the layer
            lacks, or that leaves its input as it is, is None.
        sizes: a head's dimension, and what scores are multiplied by.
    """

    def __init__(self, layer: Any):
        self.layer, self.attention = layer, layer.self_attn
        self.products: list[Any] = [getattr(layer.self_attn, name) for name in _ATTENTION]
        self.products += [getattr(layer.mlp, name) for name in _GATED]
        self.norms = [_norm(*place) for place in _norms(layer)]
        self.sizes = layer.self_attn.head_dim, layer.self_attn.scaling

    @classmethod
    def of(cls, layer: Any) -> WholeLayer | None:
        """A decoder layer that is made as a Llama's or Qwen's is; None for others."""
        # `named_children` leaves out the second name of a part that has two.
        if layer._modules.keys() - {_SECOND_NORM} != {*LAYER_NORMS, "self_attn", "mlp"}:
            return None
        inner = layer.self_attn._modules.keys()
        if inner != {*_ATTENTION} and inner != {*_ATTENTION, *_HEAD_NORMS}:
            return None
        if layer.mlp._modules.keys() != {*_GATED, "act_fn"}:
            return None
        if not all(hasattr(layer.self_attn, name) for name in ("head_dim", "scaling", "layer_idx")):
            return None
        if layer.self_attn.head_dim % 32:
            return None
        found = cls(layer)
        norms = [each for each in found.norms if each is not None]
        if any(not hasattr(each, "variance_epsilon") for each in norms):
            return None
        if any(len(each.weight) != found.sizes[0] for each in found.norms[2:4] if each is not None):
            return None
        here = all(type(each) is CpuLinear and each.weight.is_cpu for each in found.products)
        return found if here else None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same of layers that are given the same and are of the same sizes."""
        shapes = [each.weight.shape for each in self.products]
        norms = [each is None for each in self.norms[2:]]
        return getattr(self.attention, "layer_type", None), *norms, self.sizes, *shapes

    @property
    def parts(self) -> list[tuple[nn.Module, str]]:
        """What the layer is made of: what holds each part, and its name there."""
        places = [(self.layer, "self_attn"), (self.layer, "mlp"), *_norms(self.layer)]
        places += [(self.attention, name) for name in _ATTENTION]
        places += [(self.layer.mlp, name) for name in _GATED]
        return [(holder, name) for holder, name in places if name in holder._modules]

    @property
    def tensors(self) -> list[tuple[dict[str, Any], str]]:
        """What the kernel reads, in its order: where each tensor is held, if any, and its name."""
        found = [(part, "weight") for part in (*self.norms[:2], *self.products)]
        found += [(part, "bias") for part in self.products]
        found += [(norm, "weight") for norm in self.norms[2:]]
        return [(_tensors_of(part), name) for part, name in found]

    def packed(self, cache: SlabCache) -> bytes:
        """The layer as `cpu_kernels.c` is given it."""
        key, value, _, _ = cache.places(self.attention.layer_idx)
        found = [held.get(name) for held, name in self.tensors]
        addresses = [0 if each is None else each.data_ptr() for each in (*found, key, value)]
        adds_to_normed = getattr(self.layer, "norm_before_residual", False)
        eps = [0.0 if each is None else each.variance_epsilon for each in self.norms]
        return _DECODER.pack(*addresses, adds_to_normed, *eps)


def _norms(layer: Any) -> list[tuple[Any, str]]:
    """What holds each norm that a layer may have, and its name there."""
    found = [(layer, name) for name in LAYER_NORMS]
    found += [(layer.self_attn, name) for name in _HEAD_NORMS]
    return [*found, (layer, _SECOND_NORM)]


def _norm(holder: Any, name: str) -> Any:
    """A norm; None where there is none, or one that leaves its input as it is."""
    found = getattr(holder, name, None)
    return None if type(found) is nn.Identity else found


def _tensors_of(part: nn.Module | None) -> dict[str, Any]:
    return {} if part is None else part._parameters


class _Packed(NamedTuple):
    """What the kernel is given of layers and a cache, and what it was made of.

    Attributes:
        contents, cache: the cache's, and its address.
        present: weights and biases that are not None; addresses: where these stand.
        layers: None where the kernel does not fit.
    """

    contents: object
    cache: tuple[int, ...]
    present: list[Tensor]
    addresses: list[int]
    layers: bytes | None


class WholeLayers:
    """Decoder layers of one kind, one after the other, as one call.

    What the kernel is given of them is put together once for each text. Before that a layer may
    have been moved or recast, or a part of it replaced or given a hook: it is looked whether one
    was. Where the weights stand is looked up in each call.

    Args:
        model: whose layers these are, if all of them; its `norm` comes after the last.
    """

    def __init__(self, layers: Sequence[WholeLayer], model: Any = None):
        self.layers, norm = layers, _norm(model, "norm")
        self._norm = norm
        parts = [part for each in layers for part in each.parts]
        if model is not None:
            parts += [(model, "norm"), *((model.layers, str(i)) for i in range(len(layers)))]
        self._holders = [holder._modules for holder, _ in parts]
        self._names = [name for _, name in parts]
        self._parts = [getattr(*part) for part in parts]
        self._hooks = [
            hooks
            for part in self._parts
            for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        tensors = [each for layer in layers for each in layer.tensors]
        tensors += [(_tensors_of(norm), "weight")]
        self._held = [held for held, _ in tensors]
        self._kinds = [kind for _, kind in tensors]
        self._shapes = _shapes(self._now())
        self._packed = _Packed(None, (), [], [], None)

    def run(
        self,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        packed: bytes | None = None,
        **options: Any,
    ) -> Tensor | None:
        """The last layer's output [B, N, D]; None, with nothing done, where this does not fit.

        Args:
            packed: what the method `packed` gives; asked for when None.
        """
        cache = options.pop(CACHE, None)
        if not isinstance(cache, SlabCache) or position_embeddings is None:
            return None
        first = self.layers[0]
        if not _KNOWN.issuperset(options) or first.attention.config._attn_implementation != "sdpa":
            return None
        key, value, slots, start = cache.places(first.attention.layer_idx)
        if not self._fits(states, attention_mask, position_embeddings, key):
            return None
        if packed is None and (packed := self.packed(cache)) is None:
            return None
        (batch, nodes), (size, scale) = states.shape[:2], first.sizes
        width = first.products[3].out_features  # half of what a layer with a second norm reads
        out = states.new_empty(batch, nodes, width)
        group = first.products[0].out_features // first.products[1].out_features
        shape = batch, key.shape[1] * group, nodes, size
        now = attention_of(shape, key, value, attention_mask, scale)
        cos, sin = position_embeddings
        norm: Any = self._norm
        last = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.variance_epsilon)
        kernels(states.dtype).decoder_layers(
            packed, len(self.layers), states.data_ptr(), out.data_ptr(), width,
            first.products[4].out_features, cos.data_ptr(), sin.data_ptr(), now,
            None if slots is None else slots.data_ptr(), start, *last, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _fits(
        self, states: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor], key: Tensor
    ) -> bool:
        batch, nodes = states.shape[:2]
        cos, sin = angles
        if not 0 < batch * nodes <= MOST_ROWS or not plain(states, cos, sin):
            return False
        if cos.shape != (batch, nodes, self.layers[0].sizes[0]) or cos.shape != sin.shape:
            return False
        if mask is None and nodes > 1:
            return False
        if mask is not None:
            shape = (mask.shape[1], *mask.shape[2:])
            known = mask.dtype == states.dtype and mask.stride(-1) == 1
            if not known or shape != (1, nodes, key.shape[2]):
                return False
        return key.dtype == states.dtype and key.shape[0] == batch

    def packed(self, cache: SlabCache) -> bytes | None:
        """The layers as `cpu_kernels.c` is given them; None where one is not what it was."""
        found = self._packed  # read once: other threads decode too
        same = found.contents is cache.contents and found.cache == cache.address
        if not same or list(map(Tensor.data_ptr, found.present)) != found.addresses:
            found = self._packed = self._look(cache)
        if torch.is_grad_enabled() and not plain(*found.present):
            return None
        return found.layers

    @torch.no_grad()
    def _look(self, cache: SlabCache) -> _Packed:
        tensors, parts = self._now(), list(map(getitem, self._holders, self._names))
        present = [each for each in tensors if each is not None]
        fits = parts == self._parts and not any(self._hooks)
        fits = fits and present[0].dtype == cache.dtype and _shapes(tensors) == self._shapes
        fits = fits and plain(*present)
        layers = b"".join(each.packed(cache) for each in self.layers) if fits else None
        addresses = [each.data_ptr() for each in present]
        return _Packed(cache.contents, cache.address, present, addresses, layers)

    def _now(self) -> list[Tensor | None]:
        return list(map(dict.get, self._held, self._kinds))


def _shapes(tensors: Sequence[Tensor | None]) -> list[torch.Size | None]:
    return [None if each is None else each.shape for each in tensors]


def take_whole_layers(model: nn.Module) -> int:
    """Let decoder layers of a packed model run as one call in forwards over trees; how many do.

    The first is tried on made-up states, and the others are like it: see `_is_as_exact`. Layers
    that do already are not tried again.
    """
    parts: list[Any] = list(model.modules())
    found = [WholeLayer.of(layer) for layer in parts if "forward" not in vars(layer)]
    new = [WholeLayers([whole]) for whole in found if whole is not None]
    if new and _is_as_exact(new[0]):
        for whole in new:
            run_instead(whole.layers[0].layer, whole.run)
    return sum(map(_runs_whole, parts))


def run_instead(module: nn.Module, run: Callable[..., Any]) -> None:
    """In forwards of few rows, let a module's forward be `run`, but where that gives None.

    Args:
        run: takes what the module's own forward is given by name, and the states of a layer first.
    """
    module.forward = functools.partial(_either, module, run)


def _runs_whole(layer: nn.Module) -> bool:
    own: Any = vars(layer).get("forward")
    runs = getattr(own, "func", None) is _either
    return runs and isinstance(getattr(own.args[1], "__self__", None), WholeLayers)


def _either(module: nn.Module, run: Callable[..., Any], *states: Any, **options: Any) -> Any:
    if len(states) < 2 and attends_in_few_rows():
        found = run(*states, **options)
        if found is not None:
            return found
    return type(module).forward(module, *states, **options)


@torch.no_grad()
def _is_as_exact(whole: WholeLayers) -> bool:
    """Whether the kernel errs no more than the layer itself, over made-up states.

    Of two rows of five nodes, and then of one each that sees them without a mask. What is true is
    computed in the next wider type.
    """
    layer, parts = whole.layers[0].layer, whole.layers[0]
    draws, own = torch.Generator().manual_seed(0), parts.products[0].weight.dtype
    wider = torch.float32 if own == torch.bfloat16 else torch.float64
    size, heads = parts.sizes[0], parts.products[1].out_features // parts.sizes[0]
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
        states = torch.randn(2, nodes, parts.products[0].in_features, generator=draws)
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
                position_embeddings=tuple(
                    each.to(own).to(dtype) for each in (angles.cos(), angles.sin())
                ),
                **{CACHE: caches[name]},
            )
            if found[name] is None:
                return False
        true = found.pop("true")
        errors.append([(found[name].to(wider) - true).norm().item() for name in ("whole", "own")])
    return all(ours <= _SLACK * own for ours, own in errors)


def _widened(layer: Any, dtype: torch.dtype) -> Any:
    """A copy in a wider type, also within its norms, which transformers computes in float32."""
    made = copy.deepcopy(layer).to(dtype)
    for part, name in _norms(made):
        if (own := _norm(part, name)) is None:
            continue
        norm = nn.RMSNorm(len(own.weight), own.variance_epsilon, dtype=dtype)
        norm.weight = own.weight
        setattr(part, name, norm)
    return made
