"""Tiny targets whose files hold a module for multi-token prediction, as released models name it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support.recurrent import DELTA, EXPERTS, LAYERS, family
from tests.support.tiny import config_of

_EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_LATENT = {
    "head_dim": ..., "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip


CONFIGS = {
    "glm4": partial(config_of, tf.Glm4MoeConfig, **_EXPERTS),
    "deepseek-v3": partial(config_of, tf.DeepseekV3Config, **_EXPERTS, **_LATENT),
    "glm4-lite": partial(config_of, tf.Glm4MoeLiteConfig, **_EXPERTS, **_LATENT),
    "hy-v3": partial(config_of, tf.HYV3Config, head_dim=8, num_experts=4, num_shared_experts=1,
                     router_scaling_factor=1.0, **_EXPERTS),
}  # fmt: skip
"""Their layers have experts; attention of two has latent keys and values. Of the last two
transformers has no field for the number of modules."""


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
            weights[name.replace(f".{last}.", f".{number}.", 1)] = _drawn(weights[name])
        prefix = f"model.layers.{number}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{prefix}.{name}.weight"] = torch.rand(size).add(0.5).double()
        weights[f"{prefix}.eh_proj.weight"] = torch.randn(size, 2 * size).mul(0.2).double()
    return _loaded(folder, weights)


def _drawn(like: Tensor) -> Tensor:
    norm = like.dim() == 1
    return (torch.rand(like.shape) + 0.5 if norm else torch.randn(like.shape) * 0.3).double()


def _module(weights: dict[str, Tensor], number: int, least: float) -> dict[str, Tensor]:
    """A random module with a layer like a target's, and norms from `least` up."""
    like, size = f"model.layers.{number}.", weights["model.norm.weight"].numel()
    module = {
        f"layers.0.{name.removeprefix(like)}": _drawn(tensor)
        for name, tensor in weights.items()
        if name.startswith(like)
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        module[f"{name}.weight"] = torch.rand(size).add(least).double()
    module["fc.weight"] = torch.randn(size, 2 * size).mul(0.2).double()
    return module


def _loaded(folder: Path, weights: dict[str, Tensor]) -> Any:
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # Experts run in torch's grouped_mm, which takes float32 and narrower types only.
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()


_TYPES = LAYERS | {"layer_types": ["linear_attention", "full_attention"] * 2}
_TEXT = {**_TYPES, **DELTA}
HYBRIDS = {
    "qwen3-next": family(tf.Qwen3NextForCausalLM, tf.Qwen3NextConfig, **_TEXT, **EXPERTS),
    "qwen3.5": family(tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig, **_TEXT),
    "qwen3.5 experts": family(
        tf.Qwen3_5MoeForCausalLM, tf.Qwen3_5MoeTextConfig, **_TEXT, **EXPERTS
    ),
}
"""Targets with recurrent layers; the last layer attends, as the module's does."""


_MIXED = {
    "head_dim": ..., "num_hidden_layers": 4, "sliding_window": 5,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_FEW = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {
    "exaone4": partial(config_of, tf.Exaone4Config, **_MIXED),
    "exaone-moe": partial(config_of, tf.ExaoneMoeConfig, **_MIXED, **_FEW),
    "gemma2": partial(config_of, tf.Gemma2Config, **_MIXED),
}
"""Targets of which some layers see a window alone."""


def windowed_with_module(kind: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A float64 target loaded from `folder`, and its random module, whose layer is of the kind of
    the target's first one."""
    torch.manual_seed(4)
    model: Any = tf.AutoModelForCausalLM.from_config(WINDOWED[kind]()).double()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    module = _module(weights, 0, 0.5)
    named = {f"mtp.{name}": tensor for name, tensor in module.items()}
    return _loaded(folder, weights | named), module


def hybrid_with_module(
    kind: str,
    folder: Path,
    fused: bool = False,
    changes: dict[str, Tensor | None] | None = None,
) -> Any:
    """A float64 target loaded from `folder`, with a random module by the names of Qwen's files.

    Args:
        fused: whether a tensor holds all experts of the module, instead of one for each of them.
        changes: tensors to add to those of the module, by name, or to leave out where None.
    """
    torch.manual_seed(4)
    model = HYBRIDS[kind]()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # What these norms multiply by is added to 1.
    module = _module(weights, model.config.num_hidden_layers - 1, -0.5)
    if fused:
        _fuse(module, "layers.0.mlp.experts.", model.config.num_experts)
    kept = {
        name: tensor for name, tensor in {**module, **(changes or {})}.items() if tensor is not None
    }
    return _loaded(folder, weights | {f"mtp.{name}": tensor for name, tensor in kept.items()})


def _fuse(module: dict[str, Tensor], prefix: str, count: int) -> None:
    def of_all(name: str) -> Tensor:
        return torch.stack([module.pop(f"{prefix}{n}.{name}_proj.weight") for n in range(count)])

    module[f"{prefix}gate_up_proj"] = torch.cat([of_all("gate"), of_all("up")], 1)
    module[f"{prefix}down_proj"] = of_all("down")


@torch.no_grad()
def transformers_own(target: Any, ids: Tensor) -> Any:
    """What its class for such a module predicts after a text, [1, V]."""
    theirs: Any = MtpModel.from_pretrained(target)
    features = target.get_decoder()(ids)[0]
    cache, given = MtpCache(config=target.config.get_mtp_config()), ids[:, 1:]
    positions = torch.arange(1, ids.shape[1]).unsqueeze(0)
    return theirs(given, features[:, :-1], torch.ones_like(given), positions, cache)[1][:, 0]


@torch.no_grad()
def ours(target: Any, drafter: Any, ids: Tensor) -> Tensor:
    """What the drafter predicts after a text, [1, V]."""
    where = torch.arange(ids.shape[1]).unsqueeze(0) == ids.shape[1] - 2
    features = target.get_decoder()(ids)[0]
    return drafter.draft_logits(1)(drafter.draft_hidden_states(features, ids, where, 1)[0])
