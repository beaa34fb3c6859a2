"""Recurrent layers of transformers' models, run over token trees by their own code.

A layer's forward projects its input, calls two or three functions of its module by name (a
convolution, a scan), and projects their result. On a slab cache it runs with functions in their
places that know trees: the same code object, in a copy of the module's namespace. So how a layer
projects, gates and norms is never written again here, and nothing that others use is changed.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .cache import SlabCache
from .errors import undrivable
from .recurrent import RecurrentLayer
from .tree_scans import convolve, delta_rule, state_space

_Own = Callable[[], Callable[..., Any]]  # looks up what a module calls by that name itself


class _Now(threading.local):
    """The recurrent layer that a thread runs now."""

    layer: RecurrentLayer


_now = _Now()


@contextmanager
def _running(layer: RecurrentLayer) -> Iterator[None]:
    before = getattr(_now, "layer", None)
    _now.layer = layer
    try:
        yield
    finally:
        _now.layer = before  # type: ignore[assignment]


def _causal_conv1d(own: _Own) -> Callable[..., Tensor]:
    def run(
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        tree = _now.layer.owner.tree
        if tree is None:
            return own()(inputs, weight=weight, bias=bias, activation=activation, **options)
        return convolve(inputs, weight, bias, activation, tree)

    return run


def _causal_conv1d_update(own: _Own) -> Callable[..., Tensor]:
    """Of layers that hand single tokens to it whatever their cache says."""

    def run(
        inputs: Tensor,
        kept: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        tree = _now.layer.owner.tree
        assert tree is not None
        return convolve(_now.layer.update_conv_state(inputs), weight, bias, activation, tree)

    return run


def _delta_rule(own: _Own) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer, normalize = _now.layer, use_qk_l2norm_in_kernel
        if (tree := layer.owner.tree) is None:
            real = layer.real(g.shape[1], g.device)
            if real is not None:  # what follows a prompt neither decays its state nor moves it
                real = real.view(*real.shape, *[1] * (g.dim() - 2))
                g, beta = g * real, beta * real.view(*real.shape[:2], 1)
            return own()(
                query, key, value, g=g, beta=beta, initial_state=initial_state,
                use_qk_l2norm_in_kernel=normalize, **options,
            )  # fmt: skip
        assert initial_state is not None
        found, layer.updates = delta_rule(
            query, key, value, g, beta, initial_state, normalize, tree, layer.updates
        )
        return found.to(query.dtype), initial_state

    return run


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _chunk_scan(own: _Own) -> Callable[..., Any]:
    def run(
        inputs: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        **options: Any,
    ) -> Any:
        layer = _now.layer
        if (tree := layer.owner.tree) is not None:
            assert initial_states is not None
            steps = _steps(dt, dt_bias, dt_softplus)
            found, layer.updates = state_space(
                inputs, steps, A, B, C, D, initial_states, tree, layer.updates
            )
            return (found, initial_states) if return_final_states else found
        real = layer.real(dt.shape[1], dt.device)
        if real is not None:  # a step of length 0 changes nothing
            dt = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit) * real.unsqueeze(-1)
            dt_bias, dt_softplus, dt_limit = None, False, (0.0, float("inf"))
        return own()(
            inputs, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias,
            dt_softplus=dt_softplus, dt_limit=dt_limit, initial_states=initial_states,
            return_final_states=return_final_states, **options,
        )  # fmt: skip

    return run


def _state_update(own: _Own) -> Callable[..., Tensor]:
    """Of a single token, with all that is one number a head repeated along its dimensions."""

    def run(
        state: Tensor,
        inputs: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> Tensor:
        layer = _now.layer
        tree = layer.owner.tree
        assert tree is not None
        steps = _steps(dt, dt_bias, dt_softplus)[..., :1].transpose(1, 2)  # [B, 1, H]
        skip = None if D is None else D[:, 0]
        found, layer.updates = state_space(
            inputs.unsqueeze(1),
            steps,
            A[:, 0, 0],
            B.unsqueeze(1),
            C.unsqueeze(1),
            skip,
            state,
            tree,
            layer.updates,
        )
        out = found.squeeze(1)
        return (out if z is None else out * F.silu(z)).to(inputs.dtype)

    return run


_CONVOLUTION = {
    "causal_conv1d_fn": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d_update,
}
_SCANS: dict[str, Callable[[_Own], Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_selective_state_update": _state_update,
}
"""Functions that recurrent layers call by these names, and what knows trees in their places."""


@functools.cache
def _for_slabs(forward: FunctionType) -> FunctionType | None:
    """A layer's forward with functions that know trees; None where it calls others."""
    names = set(forward.__code__.co_names)
    scans = names & _SCANS.keys()
    if "causal_conv1d_fn" not in names or ("update_recurrent_state" in names and not scans):
        return None
    known = forward.__globals__
    found = {
        name: make(functools.partial(known.__getitem__, name))
        for name, make in (_CONVOLUTION | _SCANS).items()
        if name in names
    }
    made = FunctionType(
        forward.__code__, known | found, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _either(
    module: Any, run: FunctionType, own: Callable[..., Any], *given: Any, **options: Any
) -> Any:
    """A layer's forward: over a slab cache `run`, which knows trees, else its own."""
    caches = (each for each in (*given, *options.values()) if isinstance(each, SlabCache))
    cache = next(caches, None)
    if cache is None or cache.recurrent is None:
        return own(*given, **options)
    with _running(cache.recurrent.layers[module.layer_idx]), _fetched(module):
        return run(module, *given, **options)


@contextmanager
def _fetched(module: nn.Module) -> Iterator[None]:
    """Meanwhile a layer's convolutions, which are never called, have their weights at hand."""
    convolutions = [each for each in module.children() if isinstance(each, nn.Conv1d)]
    hooked: list[Any] = [each for each in convolutions if hasattr(each, "_hf_hook")]  # accelerate's
    for each in hooked:
        each._hf_hook.pre_forward(each)
    try:
        yield
    finally:
        for each in hooked:
            each._hf_hook.post_forward(each, ())


def take_recurrent(model: PreTrainedModel, layers: Iterable[int]) -> None:
    """Let a model's recurrent layers run over slab caches; with other caches they are as before.

    Args:
        layers: the numbers of those that keep a state.

    Raises:
        UnsupportedTarget: one is of a kind that cannot.
    """
    name, missing = model.config.get_text_config(decoder=True).model_type, set(layers)
    for module in model.modules():
        if getattr(module, "layer_idx", None) not in missing or isinstance(module, PreTrainedModel):
            continue
        forward: Any = inspect.unwrap(type(module).forward)
        if "update_conv_state" not in forward.__code__.co_names:
            continue
        if (run := _for_slabs(forward)) is None:
            break
        missing.discard(module.layer_idx)  # type: ignore[arg-type]
        place = "_old_forward" if hasattr(module, "_old_forward") else "forward"  # of accelerate
        own = getattr(module, place)
        if getattr(own, "func", None) is not _either:
            setattr(module, place, functools.partial(_either, module, run, own))
    if missing:
        raise undrivable(
            name,
            f"keeps a state at layer {min(missing)} that cannot be rolled back; expected keys and "
            "values, a gated delta rule, a state space as Mamba-2's, or a short convolution",
        )
