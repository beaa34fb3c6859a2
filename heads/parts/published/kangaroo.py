"""Kangaroo's adapters of their authors (github.com/Equationliu/Kangaroo).

Decoder layers of Llama without MLPs, a norm, and the target's own output layer. They are read as
layers whose MLPs have one entry and write zeros. No file says after which of the target's layers
the adapter stands; its authors give 2 of 32 for Vicuna 7B.
"""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError

_OWN = r"layers\.\d+\.(self_attn\.[qkvo]_proj|input_layernorm)\.weight"
_NAME = re.compile(rf"norm\.weight|{_OWN}")
_LEFT_OUT = ".rotary_emb.inv_freq"  # which the code that reads it computes
_ROPE_THETA = 10_000.0  # whatever the config says


def of_kangaroo(names: Collection[str]) -> bool:
    """Whether an adapter's tensors have these names, which no language model has alone."""
    own = [name for name in names if not name.endswith(_LEFT_OUT)]
    return "norm.weight" in own and len(own) > 1 and all(map(_NAME.fullmatch, own))


def kangaroo(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' adapters; sizes are the tensors', but for those of heads."""
    if not of_kangaroo(tensors):
        return None
    found = {name: each for name, each in tensors.items() if not name.endswith(_LEFT_OUT)}
    norm, heads = found["norm.weight"], config.get("num_attention_heads")
    size, keys = len(norm), len(found["layers.0.self_attn.k_proj.weight"])
    if type(heads) is not int or heads < 1 or size % heads or keys % (size // heads):
        raise ArtifactError(
            f"its num_attention_heads is {heads!r}, with states of {size} and keys of {keys} "
            "entries; expected whole heads of keys: restore the config that was published."
        )
    count = len({name.split(".")[1] for name in found if name.startswith("layers.")})
    layer = {
        "hidden_size": size, "intermediate_size": 1, "num_attention_heads": heads,
        "num_key_value_heads": keys // (size // heads), "head_dim": size // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6), "rope_theta": _ROPE_THETA,
        "num_hidden_layers": count,
    }  # fmt: skip
    named = {f"model.{name}" if name[:4] != "norm" else name: each for name, each in found.items()}
    for number in range(count):
        place = f"model.layers.{number}."
        for part, shape in {"gate": (1, size), "up": (1, size), "down": (size, 1)}.items():
            named[f"{place}mlp.{part}_proj.weight"] = torch.zeros(shape, dtype=norm.dtype)
        named[f"{place}post_attention_layernorm.weight"] = torch.ones_like(norm)
    known = {"layer": layer, "layers": count, "hidden_size": size}
    return known | {"vocab_size": config.get("vocab_size")}, named
