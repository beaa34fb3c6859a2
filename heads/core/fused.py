"""A target's small operators as one launch each, while one thread runs one forward.

A plain token of a Llama launches some forty kernels a layer, most of which do little more than read
what the last one wrote. Norms are one operator each here, with the sums before them where a layer
is as Llama's, see `fused_norms`; and so are the cosines and sines of a rotary embedding, see
`fused_angles`, the rotary embedding with the write to the cache, see `fused_writes`, and linear
layers, see `fused_products`: those of queries, keys and values together, those of a gated product,
and each other one alone. Attention stays what it is. No model code is changed: modules and
functions are found by what they look like, and each is replaced only where a trial on random
numbers shows that it does the same. On CUDA they are the kernels of `fused_kernels` and
`product_kernels`; on a CPU fewer of torch's own operators, called as they are, since each call
costs microseconds; elsewhere, and in float64, those that transformers applies, in its order. While
torch compiles a forward, only the products are ours, and it makes kernels of the rest itself.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from . import cpu_kernels
from .errors import MALFORMED
from .fused_angles import angles_of, is_rotary, replaces
from .fused_norms import LAYER_NORMS, Sums, eps_of, is_as_llamas, rms_norm, run_layer
from .fused_products import (
    MOST_ROWS,
    alike,
    gated_layers,
    has_kernels,
    one_layer,
    rows_together,
    three_layers,
)
from .fused_products import weights_of as weights
from .fused_writes import AttentionLayer, Writes, kernels_for, rotate
from .offload import device_of, in_shards, offloaded
from .trial import nearly_equal, random_numbers

_ROTARY = "apply_rotary_pos_emb"  # as transformers' models name it
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # as layers of transformers call them, in order
_TOGETHER = {*_PROJECTIONS, "gate_proj", "up_proj"}  # layers that read the same states


class _Forward(threading.local):
    """How many forwards with fused operators a thread is in, and what its next layers will give."""

    def __init__(self) -> None:  # in each thread; compilers overlook what hides a class's own
        self.depth = 0
        self.sines: tuple[Tensor, Tensor] | None = None  # given last, and as `_rotated` reads them
        self.states: Tensor | None = None  # what three layers have read
        self.ready: dict[nn.Module, Tensor] = {}  # what those of them give that are called next
        self.writes, self.sums = Writes(), Sums()


_now = _Forward()


def fused_writes() -> Writes | None:
    """What the forward that this thread runs now is about to write; None where none is fused."""
    return _now.writes if _now.depth else None


@torch.library.custom_op("headstart::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up, elementwise, of tensors of one shape."""
    kernels = kernels_for(gate)
    return F.silu(gate) * up if kernels is None else kernels.gated(gate, up)


def has_kernels_for(model: nn.Module) -> bool:
    """Whether a model's weights are all on one GPU whose kernels compute with them."""
    weights = list(model.parameters())
    if not weights or offloaded(model) or in_shards(model):
        return False
    return has_kernels(weights[0]) and len({weight.device for weight in weights}) == 1


class FusedLayers:
    """What of a model is fused in forwards of the thread that runs them `with` this.

    Args:
        model: its modules get a `forward` that does the same as before elsewhere.

    Attributes:
        found: how many modules, or functions, of each kind are fused.
        rows: for how many rows the layers of a kind, or those alone with a weight of that shape,
            are one launch of ours, see `rows_together`.
    """

    def __init__(self, model: PreTrainedModel):
        self.rows: dict[str, int] = {}
        self.found = {"norms": 0, "gated layers": 0, "projections": 0, "rotary": 0}
        with torch.no_grad():
            for module in model.modules():
                self._take(module)
                self._take_angles(module)
                self._take_projections(module)
                for name, layer in module.named_children():
                    if name not in _TOGETHER:
                        self._take_alone(layer)
            for module in model.modules():
                self._take_layers(module)
            self._take_rotary(model)

    def __enter__(self) -> None:
        _now.depth += 1

    def __exit__(self, *exception: Any) -> None:
        _now.depth -= 1
        _now.states, _now.writes, _now.sums = None, Writes(), Sums()
        _now.ready.clear()

    def _take(self, module: nn.Module) -> None:
        own = vars(module).get("forward")
        if own is not None and getattr(own, "func", None) is not _either:
            return  # a hook of accelerate, say, comes before it
        fused, kind = _fused_form(module)
        if fused is None:
            return
        if own is None:
            # A layer of the module gives the shape; packed ones have no parameters.
            first: Any = getattr(module, "gate_proj", module)
            if not first.weight.is_floating_point() or first.weight.itemsize < 2:
                return  # it is quantised, and no states are of its type
            states = random_numbers(3, 2, first.weight.shape[-1], dtype=first.weight.dtype)
            states = states.to(device_of(first))
            try:
                found = module(states)
            except MALFORMED:  # it takes more than states, as a norm with a gate does
                return
            if not nearly_equal(found, fused(module, states)):
                return
            if fused is _gated_layer:
                self._time("gated layers", lambda: _rows_of_gated(module, states[0, :1]))
                fused = functools.partial(fused, most=self.rows["gated layers"])
            module.forward = functools.partial(_either, module, fused)
        self.found[kind] += 1

    def _take_angles(self, module: nn.Module) -> None:
        own = vars(module).get("forward")
        if own is None:
            if not is_rotary(module):
                return
            module.forward = functools.partial(_angles, module)
        elif getattr(own, "func", None) is not _angles:
            return
        self.found["angles"] = self.found.get("angles", 0) + 1

    def _take_layers(self, model: Any) -> None:
        """The decoder layers that a module has in a row, with the norms that come after them."""
        if not isinstance(getattr(model, "layers", None), nn.ModuleList):
            return
        layers, last = list[Any](model.layers), getattr(model, "norm", None)
        after = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), last]
        for layer, following in zip(layers, after, strict=True):
            own = vars(layer).get("forward")
            if own is None:
                if not all(_is_fused_norm(getattr(layer, name, None)) for name in LAYER_NORMS):
                    continue
                if _directly(layer.input_layernorm.weight) or not is_as_llamas(layer):
                    continue
                next_norm = following if _is_fused_norm(following) else None
                layer.forward = functools.partial(_in_sums, layer, next_norm)
            elif getattr(own, "func", None) is not _in_sums:
                continue
            self.found["layers"] = self.found.get("layers", 0) + 1

    def _take_projections(self, module: nn.Module) -> None:
        """Layers of queries, keys and values, of which the first that is called computes all."""
        three: list[Any] = [getattr(module, name, None) for name in _PROJECTIONS]
        own = [vars(each).get("forward") for each in three if each is not None]
        if not alike(three) or any(getattr(e, "func", None) is not _of_three for e in own if e):
            return
        if own[0] is None:
            weight = three[0].weight
            states = random_numbers(3, weight.shape[1], dtype=weight.dtype).to(weight.device)
            found = three_layers(states, *weights(three), MOST_ROWS)
            pairs = zip(three, found, strict=True)
            if not all(nearly_equal(each(states), own) for each, own in pairs):
                return
            most = self._time(
                "projections",
                lambda: rows_together(
                    lambda states: three_layers(states, *weights(three), MOST_ROWS),
                    lambda states: [each(states) for each in three],
                    states[:1],
                ),
            )
            layer = AttentionLayer(getattr(module, "layer_idx", None))
            for each in three:
                each.forward = functools.partial(_of_three, each, three, most, layer)
        self.found["projections"] += 1

    def _take_alone(self, layer: Any) -> None:
        """A layer that no other reads the states of, on a GPU where a kernel of ours is faster."""
        if not alike([layer]) or not has_kernels(layer.weight):
            return
        own = vars(layer).get("forward")
        if own is not None and getattr(own, "func", None) is not _either:
            return
        if own is None:
            most = self._time(" x ".join(map(str, layer.weight.shape)), lambda: _rows_alone(layer))
            if not most:
                return
            layer.forward = functools.partial(
                _either, layer, functools.partial(_layer_alone, most=most)
            )
        self.found["layers alone"] = self.found.get("layers alone", 0) + 1

    def _time(self, kind: str, found: Callable[[], int]) -> int:
        """Time a model's first layers of a kind, which the others are like."""
        if kind not in self.rows:
            self.rows[kind] = found()
        return self.rows[kind]

    def _take_rotary(self, model: PreTrainedModel) -> None:
        for name in {type(module).__module__ for module in model.modules()}:
            home = sys.modules[name]
            true = getattr(home, _ROTARY, None)
            if true is None:
                continue
            if not hasattr(true, "fuses"):
                device = device_of(model)
                query, key = (random_numbers(2, heads, 3, 8).to(device) for heads in (4, 2))
                cos, sin = (random_numbers(2, 3, 8, seed=seed).to(device) for seed in range(2))
                try:
                    found = true(query, key, cos, sin)
                except Exception:  # it has other arguments
                    continue
                pairs = zip(found, _rotated(query, key, cos, sin), strict=True)
                if not all(nearly_equal(*pair) for pair in pairs):
                    continue
                setattr(home, _ROTARY, _rotary_of(true))
            self.found["rotary"] += 1


def _fused_form(module: nn.Module) -> tuple[Callable[..., Tensor] | None, str]:
    """What may do the same as a module in one launch, and what kind of module it is."""
    weight = getattr(module, "weight", None)
    if eps_of(module) is not None and isinstance(weight, nn.Parameter) and weight.dim() == 1:
        return _norm, "norms"
    if isinstance(getattr(module, "gate_proj", None), nn.Linear) and hasattr(module, "act_fn"):
        return _gated_layer, "gated layers"
    return None, ""


def _directly(states: Tensor) -> bool:
    """Whether torch's operators are called without operators of our own around them."""
    return states.is_cpu and states.dtype != torch.float64


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate`, of query and key at once where it is done directly."""
    if not _directly(query):
        turned = _now.writes.turn(query, key, cos, sin) if _now.depth else None
        return rotate(query, key, cos, sin) if turned is None else turned
    if (found := cpu_kernels.rotate((query, key), cos, sin)) is not None:
        return found[0], found[1]
    if _now.sines is None or _now.sines[0] is not sin:  # all layers are given the same
        first, second = sin.unsqueeze(1).chunk(2, -1)
        _now.sines = sin, torch.cat((-first, second), -1)
    both = torch.cat((query, key), 1)
    swapped = both.roll(both.shape[-1] // 2, -1)
    both = torch.addcmul(both * cos.unsqueeze(1), swapped, _now.sines[1])
    return both[:, : query.shape[1]], both[:, query.shape[1] :]


def _norm(module: Any, states: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return type(module).forward(module, states)
    eps: Any = eps_of(module)
    if (ready := _now.sums.take(module, states)) is not None:
        return ready
    if _directly(states):
        if (found := cpu_kernels.norm(states, module.weight, eps)) is not None:
            return found
        return F.rms_norm(states, module.weight.shape, module.weight, eps)
    return rms_norm(states, module.weight, eps)


def _gated_layer(module: Any, states: Tensor, most: int = MOST_ROWS) -> Tensor:
    both = [module.gate_proj, module.up_proj]
    if torch.compiler.is_compiling():
        if not _has_kernel(both, states, most):
            return type(module).forward(module, states)
        return module.down_proj(gated_layers(states, *weights(both), most))
    if cpu_kernels.together(both, states):
        return module.down_proj(cpu_kernels.gated(both[0], both[1], states))
    if not _directly(states) and alike(both):
        return module.down_proj(gated_layers(states, *weights(both), most))
    gate, up = module.gate_proj(states), module.up_proj(states)
    return module.down_proj(F.silu(gate).mul_(up) if _directly(gate) else gated(gate, up))


def _layer_alone(module: Any, states: Tensor, most: int = MOST_ROWS) -> Tensor:
    if not _has_kernel([module], states, most):
        return type(module).forward(module, states)
    return one_layer(states, *weights([module]), most)


def _rows_alone(layer: Any) -> int:
    states = random_numbers(3, layer.weight.shape[1], dtype=layer.weight.dtype)
    states, ours = states.to(layer.weight.device), functools.partial(_layer_alone, layer)
    if not nearly_equal(layer(states), ours(states)):
        return 0
    return rows_together(ours, layer, states[:1])


def _has_kernel(layers: Sequence[Any], states: Tensor, most: int) -> bool:
    """Whether what these layers make of at most so many rows of states is left to a kernel."""
    return states.numel() <= most * states.shape[-1] and alike(layers)


def _rows_of_gated(module: Any, states: Tensor) -> int:
    both = [module.gate_proj, module.up_proj]
    if not alike(both):
        return 0
    return rows_together(
        lambda states: gated_layers(states, *weights(both), MOST_ROWS),
        lambda states: gated(module.gate_proj(states), module.up_proj(states)),
        states,
    )


def _of_three(
    module: nn.Module, three: list[Any], most: int, layer: AttentionLayer, states: Tensor
) -> Tensor:
    """One of three layers that are called one after the other with the same states."""
    if _now.depth and states is _now.states and module in _now.ready:
        found = _now.ready.pop(module)
        if not _now.ready:
            _now.states = None
        return found
    if not _now.depth or module is not three[0]:
        return type(module).forward(module, states)
    compiling = torch.compiler.is_compiling()
    if not compiling and cpu_kernels.together(three, states):
        found: Any = cpu_kernels.products(three, states)
    elif _has_kernel(three, states, most) if compiling else alike(three):
        found = three_layers(states, *weights(three), most)
    else:
        return type(module).forward(module, states)
    _now.states = states
    _now.ready = dict(zip(three[1:], found[1:], strict=True))
    if not compiling:
        _now.writes.computed(layer, found[2])
    return found[0]


def _is_fused_norm(module: Any) -> bool:
    own = vars(module).get("forward") if isinstance(module, nn.Module) else None
    return getattr(own, "func", None) is _either and own.args[1] is _norm  # type: ignore[union-attr]


def _in_sums(layer: Any, following: Any, *states: Tensor, **options: Any) -> Any:
    if _now.depth and len(states) == 1 and not torch.compiler.is_compiling():
        return run_layer(layer, following, _now.sums, *states, **options)
    return type(layer).forward(layer, *states, **options)


def _either(module: nn.Module, fused: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
    if _now.depth and len(args) == 1 and not options:
        return fused(module, args[0])
    return type(module).forward(module, *args, **options)


def _angles(
    module: Any, x: Any, position_ids: Any = None, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Of a rotary embedding, whose arguments have these names in transformers."""
    ours = _now.depth and not (torch.compiler.is_compiling() or rest or options)
    if ours and replaces(module, x, position_ids) and not _directly(x):
        return angles_of(module, x, position_ids)
    return type(module).forward(module, x, position_ids, *rest, **options)


def _rotary_of(true: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(true)
    def either(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        whole = q.shape[-1] == cos.shape[-1]  # some models turn a part of each head alone
        ours = _now.depth and not torch.compiler.is_compiling()
        if ours and whole and not rest and not options:
            return _rotated(q, k, cos, sin)
        return true(q, k, cos, sin, *rest, **options)

    either.fuses = True  # type: ignore[attr-defined]
    return either
