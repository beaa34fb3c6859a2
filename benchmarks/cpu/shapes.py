"""Llama shapes with random weights: the text does not matter to the time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SHAPES: dict[str, dict[str, int]] = {
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 256},
    "3m": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12,
           "num_attention_heads": 2, "vocab_size": 1024},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
             "num_attention_heads": 12, "vocab_size": 32000},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
}  # fmt: skip


def random_llama(shape: str, dtype: torch.dtype, **sizes: int) -> PreTrainedModel:
    """A Llama of a named shape; `sizes` take the place of the shape's own."""
    torch.manual_seed(0)
    given: dict[str, Any] = {**SHAPES[shape], "tie_word_embeddings": False, **sizes}
    return AutoModelForCausalLM.from_config(LlamaConfig(**given), dtype=dtype).eval()


def prompt_of(length: int, vocab: int) -> torch.Tensor:
    """Token ids [1, length]."""
    return torch.arange(length).remainder(vocab - 8).add(4).view(1, -1)


def greedy_after(ids: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    """What `generate` is given to write so many tokens, the likeliest ones, whatever they are."""
    return {
        "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        "max_new_tokens": new_tokens, "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
