"""A tiny random target that answers chats in letters, and ends its answers."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def talker(
    tokenizer: PreTrainedTokenizerFast, end: str, eagerness: float = 2.0, context: int = 512
) -> Any:
    """A Llama in float64 that writes ASCII letters and spaces, and `end`, the more often the more
    eager it is."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=context, initializer_range=0.3,
        tie_word_embeddings=False, bos_token_id=None, pad_token_id=0,
        eos_token_id=tokenizer.convert_tokens_to_ids(end),
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    head = nn.Linear(32, len(tokenizer), dtype=torch.float64)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.fill_(-1e4)
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcdefghijklmnopqrstuvwxyz"]
    head.bias.data[letters] = 0.0
    head.bias.data[config.eos_token_id] = eagerness
    model.lm_head = head
    model.generation_config.pad_token_id = 0
    return model
