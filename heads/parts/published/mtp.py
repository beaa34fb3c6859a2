"""Modules for multi-token prediction: as speculators saves them, or in their target's own files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from ...checkpoint import Found
from ...core import ArtifactError, brief
from ...core.errors import MALFORMED
from ...core.unsafe_settings import unsafe_settings, without_unsafe
from ..own_layers import added_to_scale, last_norm
from ..shipped_module import PREFIX, named_tensors
from ..target_layer import one_layer, own_target_layer
from .checkpoint import Checkpoint, TargetModule, cannot_be_written, speculators_config

_PREFIX = "mtp_layers.0."
_NAMES = {
    "enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm.", "eh_proj.": "input_proj.",
    "model.norm.": "final_layernorm.", "model.layers.0.": "",
}  # fmt: skip
"""What our names begin with, and theirs after the prefix, which is nothing for the layer's."""

_SCALES = {"enorm.weight", "hnorm.weight"}
"""Weights of norms which here are the scale itself, and there as in the layer's own norms."""

_WRITTEN = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The types of layers that speculators can read of those that can be decoded here."""


def mtp(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The checkpoints of speculators."""
    if config.get("speculators_model_type") != "mtp":
        return None
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict) or list(unsafe_settings(inner)):
        raise ArtifactError(
            "its config has no transformer_layer_config that can be used; restore the one that was "
            "published."
        )
    try:
        made = AutoConfig.for_model(**inner)
        known = {"hidden_size": made.hidden_size, "vocab_size": made.vocab_size}
        known |= {"layer": one_layer(made)}
    except (*MALFORMED, StrictDataclassError) as error:
        raise ArtifactError(
            f"its transformer_layer_config describes no layer that transformers knows "
            f"({brief(error, 100)}); expected one of the target's own type."
        ) from error
    found = {_our_name(name): tensor for name, tensor in tensors.items()}
    added = _added(known["layer"])
    for name in found.keys() & _SCALES:
        found[name] = found[name] + added
    for part, name in (("embedding", "embed_tokens.weight"), ("output", "lm_head.weight")):
        if name in found:
            known[part] = "own"  # unless it is the target's, see `Drafter.completed`
    return known, found


def _added(layer: dict[str, Any]) -> Tensor:
    """What norms of such a layer's kind add to their weight, see `added_to_scale`."""
    with torch.device("meta"):
        norm = last_norm(own_target_layer(layer))
    return added_to_scale(type(norm)(2))


def _our_name(name: str) -> str:
    if not name.startswith(_PREFIX):
        return name
    rest = name.removeprefix(_PREFIX)
    ours, theirs = next(pair for pair in _NAMES.items() if rest.startswith(pair[1]))
    return ours + rest.removeprefix(theirs)


def _write(drafter: Any) -> Checkpoint:
    own, target = drafter.config, drafter.target.config.get_text_config(decoder=True)
    if (kind := own.layer["model_type"]) not in _WRITTEN:
        what = f"its layer is one of {kind}, and speculators knows those of {', '.join(_WRITTEN)}"
        raise cannot_be_written("speculators", what, "decode with it here")
    _check_knows_all(drafter, "speculators")
    dtype = str(drafter.dtype).removeprefix("torch.")
    layer = without_unsafe(target.to_dict()) | {"torch_dtype": dtype}
    config = speculators_config(drafter, "mtp", layer)
    config |= {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    tensors, added = {}, added_to_scale(last_norm(drafter.model))
    for name, tensor in drafter.state_dict().items():
        if name in _SCALES:
            tensor = tensor - added
        ours, theirs = next(pair for pair in _NAMES.items() if name.startswith(pair[0]))
        tensors[_PREFIX + theirs + name.removeprefix(ours)] = tensor
    return Checkpoint(config, tensors)


def _check_knows_all(drafter: Any, engine: str) -> None:
    own = drafter.config
    if own.output == "trimmed":
        what = f"it knows {own.output_size} of its target's tokens"
        raise cannot_be_written(engine, what, "train it with drafter.output=shared")


_VLLM, _SGLANG, _LLAMA_CPP, _OWN = "vLLM", "SGLang", "llama.cpp", "the target's own format"
_QWEN = (_VLLM, _SGLANG, _LLAMA_CPP, _OWN)


@dataclass(frozen=True)
class _Kind:
    """A kind of target whose module engines let continue its normed states, as it does here.

    Attributes:
        engines: which do.
        settings: what the language model's config says of one module.
        around: the type of the model around the language model that they ask for; empty for any.
    """

    engines: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    around: str = ""


_IN_FILES = {
    "qwen3_next": _Kind(_QWEN),
    "qwen3_5_text": _Kind(_QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen3_5_moe_text": _Kind(_QWEN, {"mtp_num_hidden_layers": 1}),
    "exaone_moe": _Kind((_VLLM, _SGLANG, _OWN), {"num_nextn_predict_layers": 1}),
    "exaone4": _Kind((_VLLM, _OWN), {"num_nextn_predict_layers": 1}, "exaone4_5"),
}
"""By the type of the language model."""


def _in_files(engine: str) -> Callable[[Any], TargetModule]:
    able = {name: kind for name, kind in _IN_FILES.items() if engine in kind.engines}

    def write(drafter: Any) -> TargetModule:
        own, target = drafter.config, drafter.target.config
        name = target.get_text_config(decoder=True).model_type
        kind = able.get(name) if own.layer["model_type"] == name else None
        if kind is None or kind.around not in ("", target.model_type):
            what = f"its target is of type {name}, of which no module drafts there as it does here"
            known = ", ".join(each.around or name for name, each in able.items())
            raise cannot_be_written(engine, what, f"those of {known} do, so decode with it here")
        if name == "exaone_moe" and any(".experts." in name for name in drafter.state_dict()):
            what = "its layer has experts, and engines run one without them"
            raise cannot_be_written(engine, what, "decode with it here")
        _check_knows_all(drafter, engine)
        if own.embedding == "own":
            raise cannot_be_written(engine, "it embeds tokens by itself", "decode with it here")
        if getattr(target, "quantization_config", None) is not None:
            what = "its target is quantized, and the module would be read as quantized too"
            raise cannot_be_written(engine, what, "export it beside the target in full precision")
        top = bool(kind.around)
        return TargetModule(named_tensors(drafter), PREFIX, kind.settings, top)

    return write


MTP: dict[str, Callable[[Any], Checkpoint | TargetModule]] = {
    "speculators": _write,
    "vllm": _in_files(_VLLM),
    "sglang": _in_files(_SGLANG),
    "llama.cpp": _in_files(_LLAMA_CPP),
    "original": _in_files(_OWN),
}
"""What writes a drafter in each format."""
