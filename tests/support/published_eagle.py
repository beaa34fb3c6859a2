"""EAGLE heads under the names and shapes that other projects publish, with random values."""

from typing import Any

import torch
from torch import Tensor

from tests.support.equations import EPS, THETA
from tests.support.tiny import VOCAB

SIZE, HEADS, KV, WIDE = 32, 4, 2, 24
KEPT = torch.arange(1, VOCAB, 3)[:20]
SAID: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": SIZE, "intermediate_size": WIDE, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": THETA,
}  # fmt: skip


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 0.2


def layer(prefix: str, width: int) -> dict[str, Tensor]:
    """A Llama layer whose attention reads `width` entries."""
    small = KV * SIZE // HEADS
    shapes = {
        "self_attn.q_proj": (SIZE, width), "self_attn.k_proj": (small, width),
        "self_attn.v_proj": (small, width), "self_attn.o_proj": (SIZE, SIZE),
        "mlp.gate_proj": (WIDE, SIZE), "mlp.up_proj": (WIDE, SIZE), "mlp.down_proj": (SIZE, WIDE),
        "post_attention_layernorm": (SIZE,),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}


def published(version: int, prefix: str, trimmed: bool = False) -> dict[str, Tensor]:
    """Random tensors under the names of a published head."""
    embedding = {"embed_tokens.weight": random(VOCAB, SIZE)}
    if version == 1:
        return embedding | layer(prefix, SIZE) | {
            "fc.weight": random(SIZE, 2 * SIZE), "fc.bias": random(SIZE)
        }  # fmt: skip
    norms = [f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm"]
    head = layer(prefix, 2 * SIZE) | {f"{name}.weight": 1 + random(SIZE) for name in norms}
    head |= {"fc.weight": random(SIZE, 3 * SIZE)}
    if trimmed:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[KEPT] = True
        head |= {"d2t": KEPT - torch.arange(len(KEPT)), "t2d": mask}
    return embedding | head | {"lm_head.weight": random(len(KEPT) if trimmed else VOCAB, SIZE)}


DIALECTS: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "EAGLE-1": (1, "layers.0.", SAID | {"bias": True}, False),
    "EAGLE-3": (
        3, "midlayer.",
        SAID | {"draft_vocab_size": 20, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, True,
    ),
    "SpecForge": (
        3, "midlayer.", SAID | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, -1]}},
        False,
    ),
    "speculators": (
        3, "layers.0.",
        {
            "transformer_layer_config": SAID, "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 1, 0], "draft_vocab_size": 20,
        },
        True,
    ),
}  # fmt: skip
