"""The first layers of a model as a model of their own, which shares their weights."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core import (
    FusedLayers,
    OptionError,
    decoder_of,
    has_kernels_for,
    in_parts,
    loaded_whole,
    mark_packed,
    runs_packed,
    take_whole_models,
)
from .cached_layers import CachedLayers, DraftCache
from .own_layers import compute_experts_alike, last_norm, layers_of


class FirstLayers:
    """The first layers of a target as a drafter runs them; see `first_layers` for the arguments.

    A copy makes its own, of its copy of the target.

    Attributes:
        cached: their forwards over a cache, as of a model without output layer.
        fused: the context to run them in; it may be entered again.
    """

    def __init__(self, target: PreTrainedModel, count: int, norm: bool):
        self._of = target, count, norm
        self._make()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(*copy.deepcopy(self._of, memo))

    def start(self, batch: int) -> DraftCache:
        """A request's cache; the target may have been packed in place since the last one."""
        if runs_packed(self._of[0]) != self._packed:
            self._make()
        return self.cached.start(batch)

    def _make(self) -> None:
        model = first_layers(*self._of)
        self._packed = runs_packed(model)
        if self._packed:
            take_whole_models(model)
        kernels = has_kernels_for(model)
        self.fused: AbstractContextManager[Any] = FusedLayers(model) if kernels else nullcontext()
        self.cached = CachedLayers(decoder_of(model), tried=model)


def first_layers(model: PreTrainedModel, count: int, norm: bool) -> PreTrainedModel:
    """A causal language model of another's first `count` layers, for a cache of its own.

    Every part that computes is the other model's own object, so weights are in memory once, and
    what is done to them (packed, adapted) holds for both. Nothing of the other model is changed.

    Args:
        model: one that is a decoder alone.
        norm: whether its last norm follows the layers; if not, hidden states leave as they are.

    Raises:
        OptionError: no model can be made of these layers, see `layers_of`; or the weights are
            divided among processes.
    """
    if in_parts(model):
        raise OptionError(
            "the target's layers are divided among processes, and an early exit runs them in one "
            "alone; load the target without tensor_parallel, or use another drafter."
        )
    kind: Any = type(model)
    with loaded_whole(), torch.device("meta"):
        made: Any = kind._from_config(layers_of(model.config, range(count)), dtype=model.dtype)
    made.config._attn_implementation = model.config._attn_implementation
    compute_experts_alike(made, model)
    for name, module in list(made.named_modules()):
        theirs = model.get_submodule(name)
        _check_sizes(module, theirs, model.config.model_type)
        if not module._modules:
            continue  # one of theirs takes its place
        for child, part in list(module.named_children()):
            if not part._modules:
                module._modules[child] = theirs.get_submodule(child)
        module._parameters.update({own: theirs._parameters[own] for own in module._parameters})
        module._buffers.update({own: theirs._buffers[own] for own in module._buffers})
    if not norm:
        decoder = decoder_of(made)
        if (last := last_norm(decoder)) is None:
            raise OptionError(
                f"which norm follows the layers of {model.config.model_type} is not known here, so "
                "no layer can be trained after an early exit; use another drafter."
            )
        own = next(name for name, part in decoder.named_children() if part is last)
        decoder._modules[own] = nn.Identity()
    if runs_packed(model):
        mark_packed(made)
    return made.eval()


def _check_sizes(module: nn.Module, theirs: nn.Module, kind: str) -> None:
    """Refuse a table for all layers (Gemma 4's embeddings), of which fewer layers read a part."""
    for name, weight in module.named_parameters(recurse=False):
        other: Any = getattr(theirs, name, None)
        known = isinstance(other, Tensor) and other.is_floating_point() and other.numel()
        if known and other.shape != weight.shape:
            raise OptionError(
                f"{kind} has a {name} of shape {list(other.shape)} for all of its layers, and an "
                f"early exit needs one of {list(weight.shape)}; use another drafter."
            )
