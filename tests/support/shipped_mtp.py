"""Tiny targets whose files hold a module for multi-token prediction, as released models name it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from tests.support.tiny import COMMON

_EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip


def _config(kind: Any, **sizes: Any) -> Any:
    given = {**COMMON, **_EXPERTS, "num_nextn_predict_layers": 1, **sizes}
    return kind(**{name: value for name, value in given.items() if value is not ...})


CONFIGS = {
    "glm4": partial(_config, tf.Glm4MoeConfig),
    "deepseek-v3": partial(_config, tf.DeepseekV3Config, head_dim=..., **_LATENT),
}
"""Layers of both have experts; the second one's attention has latent keys and values."""


def with_module(kind: str, folder: Path, layers: int = 1) -> Any:
    """A float64 target loaded from `folder`, where it is saved with so many random layers."""
    config = CONFIGS[kind](num_nextn_predict_layers=layers)
    torch.manual_seed(4)
    model: Any = tf.AutoModelForCausalLM.from_config(config).double()
    model.save_pretrained(folder)
    weights, size = load_file(folder / "model.safetensors"), config.hidden_size
    last = config.num_hidden_layers - 1
    for number in range(last + 1, last + 1 + layers):
        for name in [name for name in weights if name.startswith(f"model.layers.{last}.")]:
            drawn = torch.rand(weights[name].shape).add(0.5) if weights[name].dim() == 1 else None
            drawn = torch.randn(weights[name].shape).mul(0.3) if drawn is None else drawn
            weights[name.replace(f".{last}.", f".{number}.", 1)] = drawn.double()
        prefix = f"model.layers.{number}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{prefix}.{name}.weight"] = torch.rand(size).add(0.5).double()
        weights[f"{prefix}.eh_proj.weight"] = torch.randn(size, 2 * size).mul(0.2).double()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # Experts run in torch's grouped_mm, which takes float32 and narrower types only.
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
