"""Which of a target's layers an adapter changes: linear ones, as far as peft adapts them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core import OptionError, decoder_of

_LEFT_OUT = {"falcon_h1": ["out_proj"], "nemotron_h": ["out_proj"]}
"""Linear layers that peft refuses to adapt, by model type: kernels read their weights directly."""


def is_adapted(name: str, modules: Sequence[str], model_type: str) -> bool:
    """Whether an adapter of these `modules` changes a linear layer of this name.

    >>> is_adapted("layers.0.mamba.out_proj", [], "bamba"), is_adapted("0.q_proj", ["k_proj"], "")
    (True, False)
    """
    leaf = name.rpartition(".")[2]
    if not modules:
        return leaf not in _LEFT_OUT.get(model_type, ()) and not _means_experts(leaf, model_type)
    return any(name == each or name.endswith(f".{each}") for each in modules)


def linear_layers(target: PreTrainedModel) -> list[str]:
    """The names of a target's linear layers that can be adapted, but for the output layer."""
    return [name for name in _linear(target) if is_adapted(name, (), target.config.model_type)]


def chosen_layers(target: PreTrainedModel, modules: Sequence[str]) -> dict[str, Any]:
    """What peft is told to adapt of a target: `modules` or, where that is empty, all it can.

    Raises:
        OptionError: one of them means experts, see `_means_experts`.
    """
    kind = target.config.model_type
    if experts := [name for name in modules if _means_experts(name, kind)]:
        raise OptionError(
            f"drafter.modules names {', '.join(experts)}, which peft takes for the experts of "
            f"{kind}; these cannot be adapted: expected some of its other linear layers, "
            f"{', '.join(linear_layers(target))}, or none for all of them."
        )
    if modules:
        return {"target_modules": list(modules)}
    if _has_experts(target):  # which are among all linear layers to peft
        return {"target_modules": linear_layers(target)}
    return {"target_modules": "all-linear", "exclude_modules": _LEFT_OUT.get(kind)}


def left_out(target: PreTrainedModel) -> str:
    """What is not adapted where `modules` is empty, because of experts; empty if nothing."""
    if not _has_experts(target):
        return ""
    kind = target.config.model_type
    also = [name for name in _linear(target) if _means_experts(name, kind)]
    others = f", and {', '.join(also)}, which peft takes for experts" if also else ""
    return f"the adapter leaves out the experts of {kind}, which are no linear layers{others}"


def _linear(target: PreTrainedModel) -> list[str]:
    named = decoder_of(target).named_modules()
    return sorted({name.rpartition(".")[2] for name, m in named if isinstance(m, nn.Linear)})


def _has_experts(target: PreTrainedModel) -> bool:
    """Whether a tensor holds all experts of a layer."""
    return any(
        (name.endswith(".experts") or "Experts" in type(module).__name__)
        and next(module.parameters(recurse=False), None) is not None
        for name, module in decoder_of(target).named_modules()
    )


@functools.cache
def _means_experts(name: str, model_type: str) -> bool:
    """Whether peft takes a layer's name for the experts of such a model.

    Where transformers had a layer for each expert before, and now has one tensor of all of them,
    peft adapts that tensor by the old name, only without dropout, and no layer of this name.
    """
    import peft

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft, which takes names as they are
        return False
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    config = peft.LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # the tensor holds more than what has this name
        return True
    return name not in (config.target_modules or ())
