"""EAGLE and Hydra heads of other trainers: their configs and tensors under this project's names.

EAGLE's are of three formats. The authors' own (github.com/SafeAILab/EAGLE) have the config of a
Llama of one layer; SpecForge's (github.com/sgl-project/SpecForge) are the same, and may add
`eagle_config`; speculators' (github.com/vllm-project/speculators) nest the layer's config in
theirs. Hydra's are its authors' (github.com/zankner/Hydra).
"""

import re
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..checkpoint import Found
from ..core import ArtifactError

_AUX = "eagle_aux_hidden_state_layer_ids"


def eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-1 and 2 heads of the authors, and HASS's; some have no bias in `fc`."""
    found = _renamed(tensors, "layers.0.")
    if _widths(found) != (2, 1):
        return None
    found.setdefault("fc.bias", torch.zeros_like(found["fc.weight"][:, 0]))
    return _known(config, found, _layer_config(config).get("vocab_size")), found


def eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-3 heads of the authors and SpecForge (`midlayer`), or of speculators (`layers.0`).

    The draft vocabulary is `d2t`, each token's target id minus its own, or the ids themselves;
    `t2d`, a mask over the target's tokens, decides which where it is there.
    """
    inside = any(name.startswith("layers.0.") for name in tensors)
    found = _renamed(tensors, "layers.0." if inside else "midlayer.")
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
    # At the top, as vLLM reads them, these are the layers whose input is read; in `eagle_config`,
    # as SGLang reads them, those whose output is.
    nested = (config.get("eagle_config") or {}).get(_AUX) or []
    if layers := config.get(_AUX) or [layer + 1 for layer in nested]:
        known["feature_layers"] = layers
    if offsets is not None and (ids := _vocabulary(offsets, mask, size)) is not None:
        found["vocabulary"] = ids
        known |= {"output": "trimmed", "draft_vocab_size": len(ids)}
    return known, found


def _known(config: dict[str, Any], found: dict[str, Tensor], size: int | None) -> dict[str, Any]:
    """The family's config, as far as every checkpoint says it; size is that of the vocabulary."""
    known = {"layer": _layer(config, found), "hidden_size": len(found["fc.weight"])}
    return known if size is None else {**known, "vocab_size": size}


def _renamed(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, without those that are not the drafter's own."""
    foreign = ("embed_tokens.weight", "rotary_emb.inv_freq")
    return {
        name.replace(layer, "model.layers.0.", 1) if name.startswith(layer) else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(foreign)
    }


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


_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
_BORROWED = re.compile(r"input_embed_fn\.weight|.*\.embed_tokens\.weight|.*\.rotary_emb\..*")
"""Names in a checkpoint of the authors; the last are the target's, or follow from its config."""


def hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' heads, with or without the prefix; see `StoredDrafter.from_checkpoint`.

    Head i, from 0, has blocks `hydra_mlp.{i}.{j}` and an output layer `hydra_lm_head.{i}`; with the
    prefix, a one-layer model, every other place of both is a dropout's. The blocks after a head's
    first are one under several names, of which a file may hold one alone; here they are copies.
    """
    if not any(name.startswith("hydra_mlp.") for name in tensors):
        return None
    arch, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
    prefix = any(name.startswith("prefix_embeding_layer.") for name in tensors)
    grounded = any(".res_connection." in name for name in tensors)
    if arch not in ("mlp", "prefix-mlp") or not grounded or offset:
        raise ArtifactError(
            f"its hydra_head_arch is {arch!r}, grounded_heads {grounded} and "
            f"hidden_state_offset {offset}; expected 'mlp' or 'prefix-mlp', True and 0."
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if block := _BLOCK.fullmatch(name):
            head, place, part = block.groups()
            found[f"mlp.{head}.{int(place) // (2 if prefix else 1)}.{part}"] = tensor
        elif output := _OUTPUT.fullmatch(name):
            found[f"output.{output[1]}.{output[2]}"] = tensor
        elif not _BORROWED.fullmatch(name):
            found[name.replace("prefix_embeding_layer.", "prefix.")] = tensor
    heads = sum(name.endswith(".res_connection.weight") for name in found)
    layers = sum(re.fullmatch(r"mlp\.0\.\d+\.linear\.weight", name) is not None for name in found)
    if layers == 2:
        layers = max(layers, config.get("hydra_num_layers", layers))
    for head, layer, part in product(range(heads), range(2, layers), ("weight", "bias")):
        if (second := found.get(f"mlp.{head}.1.linear.{part}")) is not None:
            found.setdefault(f"mlp.{head}.{layer}.linear.{part}", second)
    known = {"heads": heads, "layers": layers, "prefix": prefix, "output": "own"}
    if (output := found.get("output.0.weight")) is not None:
        known |= {"vocab_size": output.shape[0], "hidden_size": output.shape[1]}
    return known, found
