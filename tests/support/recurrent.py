"""Tiny random models with recurrent layers, in the families that transformers has of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.support.tiny import config_of

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
SHORT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}


def family(model: type, config: type, **options: Any) -> Callable[..., Any]:
    """How to build a model whose decays and convolutions are as large as the others' weights."""

    def build(**more: Any) -> Any:
        made = model(config_of(config, **{**options, **more})).double()
        for name, weight in made.named_parameters():
            if name.endswith(("dt_bias", "conv1d.weight", "conv1d.bias", "conv.weight")):
                nn.init.normal_(weight, std=0.7)
        if hasattr(made, "set_experts_implementation"):
            made.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
        return made

    return build


RECURRENT: dict[str, Callable[..., Any]] = {
    "qwen3-next": family(tf.Qwen3NextForCausalLM, tf.Qwen3NextConfig, **LAYERS, **DELTA, **EXPERTS),
    "qwen3.5": family(tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig, **LAYERS, **DELTA),
    "qwen3.5 experts": family(
        tf.Qwen3_5MoeForCausalLM, tf.Qwen3_5MoeTextConfig, **LAYERS, **DELTA, **EXPERTS
    ),
    "olmo-hybrid": family(
        tf.OlmoHybridForCausalLM,
        tf.OlmoHybridConfig,
        **{**LAYERS, **DELTA, "linear_num_key_heads": 4, "head_dim": ...},
    ),
    "kimi-linear": family(  # decays that differ by channel, and keys and values of other widths
        tf.KimiLinearForCausalLM,
        tf.KimiLinearConfig,
        **LAYERS,
        num_key_value_heads=4,
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=4,  # all layers
        n_group=1,
        topk_group=1,
    ),
    "lfm2": family(
        tf.Lfm2ForCausalLM,
        tf.Lfm2Config,
        **SHORT,
        head_dim=...,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2 experts": family(
        tf.Lfm2MoeForCausalLM,
        tf.Lfm2MoeConfig,
        **SHORT,
        head_dim=...,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "falcon-h1": family(  # layers that attend and are recurrent
        tf.FalconH1ForCausalLM,
        tf.FalconH1Config,
        **{**MAMBA, "mamba_n_heads": 4},
        mamba_d_ssm=32,
        head_dim=...,
    ),
    "bamba": family(
        tf.BambaForCausalLM,
        tf.BambaConfig,
        **MAMBA,
        head_dim=...,
        attn_layer_indices=[1],
        num_hidden_layers=3,
    ),
    "granite hybrid": family(
        tf.GraniteMoeHybridForCausalLM,
        tf.GraniteMoeHybridConfig,
        **MAMBA,
        head_dim=...,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=32,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
    ),
    "nemotron-h": family(  # a layer that keeps nothing
        tf.NemotronHForCausalLM,
        tf.NemotronHConfig,
        num_hidden_layers=...,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=6,
        n_groups=2,
        mlp_hidden_act="silu",
        chunk_size=8,
    ),
    "zamba2": family(
        tf.Zamba2ForCausalLM,
        tf.Zamba2Config,
        num_hidden_layers=4,
        head_dim=...,
        num_key_value_heads=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_d_state=6,
        mamba_ngroups=2,
        chunk_size=8,
        num_mem_blocks=1,
        use_shared_attention_adapter=False,
        use_mem_rope=True,
    ),
}
"""Of one recurrent kind or another each: gated delta rules, state spaces as Mamba-2's, and short
convolutions."""


def fresh(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of that family, random, eval."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return RECURRENT[name]().to(dtype).eval()


@cache
def recurrent(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The same object at every call, see `fresh`."""
    return fresh(name, dtype)
