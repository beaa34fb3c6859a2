"""Hydra heads under the names of their authors, with random values."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from tests.support.tiny import VOCAB, tiny

SIZE, HEADS = 32, 3


def public(arch: str, layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's config and tensors under the names of its authors, with random values."""
    config = {
        "hydra_num_heads": HEADS, "hydra_num_layers": layers, "hydra_head_arch": arch,
        "grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "tiny",
    }  # fmt: skip
    step = 2 if arch == "prefix-mlp" else 1  # dropouts stand between the blocks
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (VOCAB, SIZE)}
    for head in range(HEADS):
        wide = (head + 2) * SIZE
        name = f"hydra_mlp.{head}.{step - 1}"
        for part in ("linear", "res_connection"):
            shapes |= {f"{name}.{part}.weight": (SIZE, wide), f"{name}.{part}.bias": (SIZE,)}
        for layer in range(1, layers):
            name = f"hydra_mlp.{head}.{step * layer + step - 1}.linear"
            shapes |= {f"{name}.weight": (SIZE, SIZE), f"{name}.bias": (SIZE,)}
        name = f"hydra_lm_head.{head}" + (".1" if step == 2 else "")
        shapes |= {f"{name}.weight": (VOCAB, SIZE), f"{name}.bias": (VOCAB,)}
    tensors = {
        name: torch.randn(shape, dtype=torch.float64) * 0.3 for name, shape in shapes.items()
    }
    for head in range(HEADS):  # one block under all names but the first
        for layer in range(2, layers):
            for part in ("weight", "bias"):
                block = f"hydra_mlp.{head}.{{}}.linear.{part}"
                same = tensors[block.format(2 * step - 1)]
                tensors[block.format(step * layer + step - 1)] = same
    if arch == "prefix-mlp":
        own = LlamaModel(LlamaConfig(**{**tiny("llama").config.to_dict(), "num_hidden_layers": 1}))
        for name, tensor in own.double().state_dict().items():
            tensors[f"prefix_embeding_layer.{name}"] = torch.randn_like(tensor) * 0.3
        rotary = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[rotary] = torch.ones(4)
    return config, tensors
