"""A tiny model of every architecture that is tested, with recurrent layers and without."""

from collections.abc import Callable
from typing import Any

import transformers as tf

from tests.support.recurrent import RECURRENT
from tests.support.tiny import COMMON, VOCAB, config_of

WINDOW: dict[str, Any] = {"sliding_window": 9}
MIXED: dict[str, Any] = {
    **WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PADDED_FROM = 52
"""Where the padded vocabulary's spare rows begin."""


def family(model: type, config: type, **options: Any) -> Callable[[], Any]:
    """How to build a model, see `config_of`."""
    return lambda: model(config_of(config, **options))


def padded() -> Any:
    """As checkpoints with padded embeddings are: the spare rows were never trained."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON))
    model.lm_head.weight.data[PADDED_FROM:] = 0
    return model


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": family(tf.LlamaForCausalLM, tf.LlamaConfig),
    "llama tied": family(tf.LlamaForCausalLM, tf.LlamaConfig, tie_word_embeddings=True),
    "llama padded": padded,
    "mistral": family(tf.MistralForCausalLM, tf.MistralConfig, **WINDOW),
    "mixtral": family(
        tf.MixtralForCausalLM, tf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2": family(tf.Qwen2ForCausalLM, tf.Qwen2Config, head_dim=...),
    "qwen2 window": family(
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config,
        head_dim=...,
        use_sliding_window=True,
        max_window_layers=1,
        **WINDOW,
    ),
    "qwen3": family(tf.Qwen3ForCausalLM, tf.Qwen3Config),
    "gemma2": family(
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        **MIXED,
    ),
    "gemma3": family(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, query_pre_attn_scalar=8, **MIXED),
    "gemma4": family(  # heads of two sizes, embeddings for each layer, and layers without own keys
        tf.Gemma4ForCausalLM,
        tf.Gemma4TextConfig,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        global_head_dim=16,
        num_kv_shared_layers=2,
        initializer_range=0.2,
        **WINDOW,
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    ),
    "gemma4 keys as values": family(
        tf.Gemma4ForCausalLM,
        tf.Gemma4TextConfig,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
        initializer_range=0.1,
        **WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": family(tf.Phi3ForCausalLM, tf.Phi3Config, head_dim=..., **WINDOW),
    "gpt2": family(
        tf.GPT2LMHeadModel, tf.GPT2Config, head_dim=..., num_key_value_heads=..., n_inner=48
    ),
    "gpt-neox": family(
        tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, head_dim=..., num_key_value_heads=...
    ),
    "olmo2": family(tf.Olmo2ForCausalLM, tf.Olmo2Config, head_dim=...),
    "granite": family(
        tf.GraniteForCausalLM,
        tf.GraniteConfig,
        head_dim=...,
        logits_scaling=6.0,
        residual_multiplier=0.7,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
    ),
    "cohere": family(tf.CohereForCausalLM, tf.CohereConfig, head_dim=..., logit_scale=0.25),
    "falcon": family(
        tf.FalconForCausalLM,
        tf.FalconConfig,
        head_dim=...,
        num_key_value_heads=...,
        intermediate_size=...,
        ffn_hidden_size=48,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "opt": family(
        tf.OPTForCausalLM,
        tf.OPTConfig,
        head_dim=...,
        num_key_value_heads=...,
        intermediate_size=...,
        initializer_range=...,
        init_std=0.4,
        ffn_dim=48,
        word_embed_proj_dim=32,
    ),
    "stablelm": family(tf.StableLmForCausalLM, tf.StableLmConfig, head_dim=...),
    "starcoder2": family(tf.Starcoder2ForCausalLM, tf.Starcoder2Config, head_dim=..., **WINDOW),
    "smollm3": family(tf.SmolLM3ForCausalLM, tf.SmolLM3Config, head_dim=..., no_rope_layers=[1, 0]),
    "deepseek-v3": family(  # keys and values of different width, routed in float32
        tf.DeepseekV3ForCausalLM,
        tf.DeepseekV3Config,
        head_dim=...,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "llama4": family(  # layers that see a chunk of the text, and some without positions
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        moe_layers=[1],
        attention_chunk_size=60,
    ),
    "gpt-oss": family(  # a learned sink beside the keys
        tf.GptOssForCausalLM, tf.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, **MIXED
    ),
    **RECURRENT,
}
