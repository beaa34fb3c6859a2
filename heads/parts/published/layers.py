"""The decoder layers of other projects' drafters: what their configs and tensors say of them.

Sizes are the tensors', wherever these tell: configs are often copied from another model's.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...core import ArtifactError

_PREFIX = "model.layers."
_KNOWN = {None, "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "speculator_model"}
_KNOWN |= {"muse_glimmer_assistant", "dflash", "dspark", "qwen3_dspark"}  # the last three trainers'
"""Types of models whose layers compute what Llama's or Qwen3's do from tensors of these names."""


_NEUTRAL = {"use_gemma_norm": False, "is_neox_style": True, "rope_is_neox_style": True}
"""Settings by which engines compute other norms or positions, and the values without effect."""


_MOST_POSITIONS = 2048
"""What Llama's configs mean that do not say max_position_embeddings."""

_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_SECTIONS = ("mrope_section", "mrope_interleaved")

_ORIGINAL = "original_max_position_embeddings"
_OF_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
"""Rotary positions scaled from those of a shorter text. Configs say its length among them or, as
Phi-3's do, outside, and all but the first may leave the factor to the ratio of both lengths."""


def layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the layers."""
    return config.get("transformer_layer_config") or config


def count_layers(found: dict[str, Tensor]) -> int:
    """How many decoder layers there are, by our names of tensors."""
    numbers = {int(n[1]) for name in found if (n := re.match(r"model\.layers\.(\d+)\.", name))}
    return max(numbers, default=-1) + 1


def read_layers(config: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Any]:
    """The layers that a checkpoint has, see `own_layers`; a bias that it lacks is added as zeros.

    Args:
        config: its whole config.
        found: its tensors by our names; `fc.weight` says how wide the layers are.

    Raises:
        ArtifactError: layers that compute something else, or a config that contradicts the tensors.
    """
    inner, size, count = layer_config(config), len(found["fc.weight"]), count_layers(found)
    check_neutral(config | inner, _NEUTRAL)
    kind = inner.get("model_type")
    if kind not in _KNOWN:
        raise ArtifactError(
            f"its layers are those of {kind!r}, which compute something else than they do here; "
            f"expected one of: {', '.join(sorted(filter(None, _KNOWN)))}."
        )
    up = found.get(f"{_PREFIX}0.mlp.up_proj.weight")
    heads = _heads(inner, found, size)
    layer = {
        "hidden_size": size,
        "intermediate_size": inner.get("intermediate_size") if up is None else len(up),
        **heads,
        "hidden_act": inner.get("hidden_act", "silu"),
        "max_position_embeddings": inner.get("max_position_embeddings", _MOST_POSITIONS),
        "rms_norm_eps": inner.get("rms_norm_eps", 1e-6),
        **_rotary(inner, heads["head_dim"]),
    }
    layer |= _biases(found, size, count) | _windows(inner, count)
    if f"{_PREFIX}0.self_attn.q_norm.weight" in found:
        layer["qk_norm"] = True
    return layer | ({"num_hidden_layers": count} if count > 1 else {})


def check_neutral(config: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """An ArtifactError where a config sets what is not run here to something that has an effect.

    Args:
        neutral: settings, each with its value without effect; None where only its absence is.
    """
    for name, value in neutral.items():
        if config.get(name) not in (None, value):
            expected = "no such setting" if value is None else f"{value} or no such setting"
            raise ArtifactError(
                f"its config sets {name} to {config[name]}, which is not run here; expected "
                f"{expected}."
            )


def _heads(inner: dict[str, Any], found: dict[str, Tensor], size: int) -> dict[str, int]:
    """How many heads of queries and of keys there are, and how large they are."""
    queries = len(found[f"{_PREFIX}0.self_attn.q_proj.weight"])
    keys = len(found[f"{_PREFIX}0.self_attn.k_proj.weight"])
    heads: Any = inner.get("num_attention_heads")
    width: Any = inner.get("head_dim")
    if (norm := found.get(f"{_PREFIX}0.self_attn.q_norm.weight")) is not None:
        width = len(norm)
    if not heads and not width:
        raise ArtifactError(
            "its config does not say num_attention_heads; restore the one that was published."
        )
    width = width or (size // heads if queries == size else queries // heads)
    if width < 1 or queries % width or keys % width or queries % keys:
        raise ArtifactError(
            f"its queries are {queries} wide and its keys {keys}, which are no whole heads of "
            f"{width}; restore the config that was published, with num_attention_heads or head_dim."
        )
    sizes = {"num_attention_heads": queries // width, "num_key_value_heads": keys // width}
    return sizes | {"head_dim": width}


def _rotary(inner: dict[str, Any], width: int) -> dict[str, Any]:
    """Rotary positions; of a model of images and text (mrope), those that text has.

    Text has the same position in all sections, and so the angles of one without sections.

    Args:
        width: of a head.
    """
    rope = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}
    if nested := sorted(key for key, value in rope.items() if isinstance(value, dict)):
        raise ArtifactError(
            f"its rotary positions differ between types of layers ({', '.join(nested)}); expected "
            "the same for all."
        )
    said = rope.pop("rope_theta", None), inner.get("rope_theta"), 10_000.0
    theta = next(each for each in said if each is not None)
    share = _share(inner, rope, width)
    for name in (*_SHARES, *_SECTIONS, "rope_dim"):
        rope.pop(name, None)
    rope = {"rope_type": rope.pop("type", "default"), **rope}
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    kind = rope["rope_type"]
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ArtifactError(
            f"its rotary positions are of kind {kind!r}; expected default or one of: "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}."
        )
    if kind == "proportional" and share != 1:
        raise ArtifactError(
            f"its rotary positions turn {share} of each head with the angles of the whole "
            "(proportional); expected another kind, or all of each head."
        )
    if kind in _OF_ORIGINAL_LENGTH:
        most = inner.get("max_position_embeddings", _MOST_POSITIONS)
        original = inner.get(_ORIGINAL) or rope.get(_ORIGINAL) or most
        rope[_ORIGINAL] = original
        if kind != "llama3" and rope.get("factor") is None:
            rope["factor"] = most / original
    factor = rope.get("factor")
    if kind != "default" and factor is not None and not 0 < factor < math.inf:
        raise ArtifactError(
            f"its rotary positions are scaled by {factor}; expected a factor above 0."
        )
    found = {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}
    return found | ({} if share == 1 else {"partial_rotary_factor": share})


def share_of(layer: dict[str, Any]) -> dict[str, float]:
    """The family's setting for the share that the positions of a read layer turn."""
    return {"partial_rotary_factor": float(layer.get("partial_rotary_factor", 1))}


def _share(inner: dict[str, Any], rope: dict[str, Any], width: int) -> float:
    """Which share of each head the positions turn, by its size or by its names in configs."""
    if size := rope.get("rope_dim"):  # which engines read first
        return size / width
    said = (where.get(name) for where in (rope, inner) for name in _SHARES)
    return next((share for share in said if share is not None), 1)


def _biases(found: dict[str, Tensor], size: int, count: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if (bias := found.get(f"{_PREFIX}0.self_attn.q_proj.bias")) is not None:
        said["attention_bias"] = True  # in transformers' layer the output has one as well
        for number in range(count):
            nothing = torch.zeros(size, dtype=bias.dtype)
            found.setdefault(f"{_PREFIX}{number}.self_attn.o_proj.bias", nothing)
    if f"{_PREFIX}0.mlp.up_proj.bias" in found:
        said["mlp_bias"] = True
    return said


def _windows(inner: dict[str, Any], count: int) -> dict[str, Any]:
    """Which layers see a window alone; nothing where all see the whole text."""
    window, types = inner.get("sliding_window"), inner.get("layer_types")
    if inner.get("model_type") in ("qwen3", "qwen2") and not inner.get("use_sliding_window"):
        window = None  # as their own configs have it
    if not types:
        types = ["sliding_attention" if inner.get("model_type") == "mistral" else "full_attention"]
        types = types * count
    odd = [kind for kind in types[:count] if kind not in ("full_attention", "sliding_attention")]
    if odd or len(types) < count:
        found = f"layers of {odd[0]!r}" if odd else f"{len(types)} layer_types"
        raise ArtifactError(
            f"its config names {found} for {count} layers; expected full_attention or "
            "sliding_attention for each."
        )
    if window is None or "sliding_attention" not in types[:count]:
        return {}
    return {"sliding_window": window, "layer_types": list(types[:count])}
