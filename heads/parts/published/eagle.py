"""EAGLE heads of other projects.

There are three formats. The authors' own (github.com/SafeAILab/EAGLE) has the config of a Llama of
one layer; SpecForge's (github.com/sgl-project/SpecForge) is the same, and may add `eagle_config`;
that of speculators (github.com/vllm-project/speculators) nests the layer's config in its own. Both
vLLM and SGLang read the first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...checkpoint import Found
from ...core import ArtifactError, weight_of
from .checkpoint import Checkpoint, cannot_be_written, llama_config
from .layer_ids import ids_by_input, ids_by_output, read_layer_ids

_OURS = "model.layers.0."
_AUTHORS_1, _AUTHORS_3 = {_OURS: "layers.0."}, {_OURS: "midlayer."}
_SPECULATORS_1 = {_OURS: "transformer.", "fc.": "fusion_fc."}
_SPECULATORS_3 = {_OURS: "layers.0."}
"""What our names of tensors begin with, and those of a format; all other names are the same."""


def eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-1 and 2 heads of the authors and of speculators, and HASS's."""
    nested = "fusion_fc.weight" in tensors
    found = _renamed(tensors, _SPECULATORS_1 if nested else _AUTHORS_1)
    if _widths(found) != (2, 1):
        return None
    if config.get("layernorms"):
        raise ArtifactError(
            "its config sets layernorms, a variant of EAGLE-1 that is not run here; expected a "
            "head without them."
        )
    known = _known(config, found, _layer_config(config).get("vocab_size"))
    return known | {"bias": "fc.bias" in found}, found


def eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-3 heads of the authors and SpecForge (`midlayer`), or of speculators (`layers.0`).

    The draft vocabulary is `d2t`, each token's target id minus its own, or the ids themselves;
    `t2d`, a mask over the target's tokens, decides which where it is there.
    """
    inside = any(name.startswith(_SPECULATORS_3[_OURS]) for name in tensors)
    found = _renamed(tensors, _SPECULATORS_3 if inside else _AUTHORS_3)
    if _widths(found)[1] != 2:
        return None
    for name in ("norm_output", "norm_before_fc", "fc_norm", "embed_requires_grad"):
        if config.get(name):
            raise ArtifactError(
                f"its config sets {name}, a variant of EAGLE-3 that is not run here; expected a "
                "head without it."
            )
    offsets, mask = found.pop("d2t", None), found.pop("t2d", None)
    size = _layer_config(config).get("vocab_size") if mask is None else len(mask)
    known = _known(config, found, size)
    known["norm_before_residual"] = bool(config.get("norm_before_residual"))
    if layers := read_layer_ids(config):
        known["feature_layers"] = layers
    if offsets is not None and (ids := _vocabulary(offsets, mask, size)) is not None:
        found["vocabulary"] = ids
        known |= {"output": "trimmed", "draft_vocab_size": len(ids)}
    return known, found


def _known(config: dict[str, Any], found: dict[str, Tensor], size: int | None) -> dict[str, Any]:
    """The family's config, as far as every checkpoint says it; size is that of the vocabulary."""
    known = {"layer": _layer(config, found), "hidden_size": len(found["fc.weight"])}
    return known if size is None else {**known, "vocab_size": size}


def _renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, without those that are not the drafter's own."""
    foreign = ("embed_tokens.weight", "rotary_emb.inv_freq")
    theirs = {there: here for here, there in names.items()}
    return {
        _with_prefix(name, theirs): tensor
        for name, tensor in tensors.items()
        if not name.endswith(foreign)
    }


def _with_prefix(name: str, prefixes: dict[str, str]) -> str:
    """A name whose beginning is replaced by what stands for it in `prefixes`, if it is there."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes[old] + name.removeprefix(old) if old else name


def _widths(found: dict[str, Tensor]) -> tuple[float, float]:
    """How many times as wide as the hidden state are what `fc` and what attention read."""
    fc, query = found.get("fc.weight"), found.get("model.layers.0.self_attn.q_proj.weight")
    if fc is None or query is None:
        return 0, 0
    return fc.shape[1] / fc.shape[0], query.shape[1] / fc.shape[0]


def _layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the layer."""
    return config.get("transformer_layer_config") or config


def _layer(config: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Any]:
    """The layer that a checkpoint has, see `layer_like`; a bias that it lacks is added as zeros."""
    inner, size = _layer_config(config), len(found["fc.weight"])
    if not (heads := inner.get("num_attention_heads")):
        raise ArtifactError(
            "its config does not say num_attention_heads; restore the one that was published."
        )
    rope = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", None) or inner.get("rope_theta") or 10_000.0
    rope = {"rope_type": rope.pop("type", "default"), **rope}
    kind = rope["rope_type"]
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ArtifactError(
            f"its rotary positions are of kind {kind!r}; expected default or one of: "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}."
        )
    up = found.get("model.layers.0.mlp.up_proj.weight")
    layer = {
        "hidden_size": size,
        "intermediate_size": inner.get("intermediate_size") if up is None else len(up),
        "num_attention_heads": heads,
        "num_key_value_heads": inner.get("num_key_value_heads") or heads,
        "head_dim": inner.get("head_dim") or size // heads,
        "hidden_act": inner.get("hidden_act", "silu"),
        "max_position_embeddings": inner.get("max_position_embeddings", 2048),
        "rms_norm_eps": inner.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
    }
    if (bias := found.get("model.layers.0.self_attn.q_proj.bias")) is not None:
        layer["attention_bias"] = True  # in transformers' layer the output has one as well
        nothing = torch.zeros(size, dtype=bias.dtype)
        found.setdefault("model.layers.0.self_attn.o_proj.bias", nothing)
    return layer


def _vocabulary(offsets: Tensor, mask: Tensor | None, size: int | None) -> Tensor | None:
    """The draft vocabulary [Vd], ascending; None where it is the whole of the target's."""
    ids = offsets.long() + torch.arange(len(offsets))
    if mask is not None and not torch.equal(ids, kept := mask.nonzero().flatten()):
        if not torch.equal(offsets.long(), kept):
            raise ArtifactError(
                f"its d2t and t2d contradict each other, {len(ids)} and {len(kept)} draft tokens, "
                "not the same ones; download it again."
            )
        ids = kept
    rising = bool((ids.diff() > 0).all())
    if not rising or ids[0] < 0 or (size is not None and ids[-1] >= size):
        raise ArtifactError(
            f"its d2t names {len(ids)} tokens from {int(ids.min())} to {int(ids.max())}, "
            f"{'ascending' if rising else 'out of order'}; expected ascending ids below {size}."
        )
    return None if len(ids) == size else ids


def _write_eagle1(drafter: Any, form: str) -> Checkpoint:
    """An EAGLE-1 drafter in a format; the target's embedding and output layer are not written."""
    tensors = dict(drafter.state_dict())
    if form == "vllm" and drafter.config.bias:
        if tensors.pop("fc.bias").any():
            raise cannot_be_written(
                "vLLM", "its fc layer has a bias, which vLLM's EAGLE-1 has not",
                "train it with drafter.bias=false, or export it to sglang",
            )  # fmt: skip
    elif form == "sglang":  # its fc always has one
        tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    config = llama_config(drafter, drafter.config.layer)
    if form == "speculators":
        names = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False, "fusion_bias": "fc.bias" in tensors,
        }  # fmt: skip
        config = _speculators_config(drafter, "eagle", config) | names
        return Checkpoint(config, _written(tensors, _SPECULATORS_1))
    config |= {
        "architectures": ["LlamaForCausalLMEagle" if form == "sglang" else "LlamaForCausalLM"],
        "bias": "fc.bias" in tensors,
    }
    return Checkpoint(config, _written(tensors, _AUTHORS_1))


def _write_eagle3(drafter: Any, form: str) -> Checkpoint:
    """An EAGLE-3 drafter in a format, with the target's embedding for speculators alone."""
    own, tensors = drafter.config, dict(drafter.state_dict())
    layer, layers = own.layer, list(own.feature_layers)
    if form != "original" and len(layers) != 3:
        raise cannot_be_written(
            form, f"it reads {len(layers)} layers of the target, expected 3",
            "train it with three drafter.feature_layers",
        )  # fmt: skip
    if form in ("sglang", "original") and own.norm_before_residual:
        raise cannot_be_written(
            form, "it adds to its normalised input (norm_before_residual)",
            "export it to vllm, or train it with drafter.norm_before_residual=false",
        )  # fmt: skip
    if form == "sglang" and layer.get("attention_bias"):
        raise cannot_be_written(
            form, "its attention has biases", "export it to vllm, which reads them"
        )
    ids = tensors.pop("vocabulary", None)
    if ids is not None:
        mask = torch.zeros(own.vocab_size, dtype=torch.bool, device=ids.device)
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": mask}
    config = llama_config(drafter, layer)
    target = drafter.target.config.get_text_config(decoder=True)
    said = {
        "draft_vocab_size": own.output_size, "target_hidden_size": target.hidden_size,
        "norm_before_residual": own.norm_before_residual,
    }  # fmt: skip
    if form == "speculators":
        config = _speculators_config(drafter, "eagle3", config) | ids_by_input(layers) | said
        config["architectures"] = ["Eagle3Speculator"]
        # Its loader leaves an embedding that is missing as it finds it in memory.
        embedding = weight_of(drafter.target.get_input_embeddings())
        tensors["embed_tokens.weight"] = embedding.to(drafter.dtype)
        return Checkpoint(config, _written(tensors, _SPECULATORS_3))
    by_output = form == "sglang"
    config |= said | (ids_by_output(layers) if by_output else ids_by_input(layers))
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    return Checkpoint(config, _written(tensors, _AUTHORS_3))


def _written(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {_with_prefix(name, names): tensor for name, tensor in tensors.items()}


def _speculators_config(drafter: Any, kind: str, layer: dict[str, Any]) -> dict[str, Any]:
    """What is the same in the configs of all speculators, around that of the layer."""
    target = drafter.target
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.config.depths}
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": target.name_or_path,
                "architectures": list(target.config.architectures or [type(target).__name__]),
            },
        },
        "transformer_layer_config": layer,
        "torch_dtype": layer["torch_dtype"],
    }


def _all_forms(write: Callable[..., Checkpoint]) -> dict[str, Callable[[Any], Checkpoint]]:
    forms = ("vllm", "sglang", "speculators", "original")
    return {form: partial(write, form=form) for form in forms}


EAGLE1, EAGLE3 = _all_forms(_write_eagle1), _all_forms(_write_eagle3)
"""What writes a drafter in each format."""
