"""A tiny random target that answers chats in letters, and ends its answers."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def talker(
    tokenizer: PreTrainedTokenizerFast, end: str, eagerness: float = 2.5, context: int = 512
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
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    with torch.no_grad():  # all other tokens have a score of 0, and one letter always has more
        weight = model.lm_head.weight
        kept = weight[letters] * 4
        last = weight[config.eos_token_id] * 4 * eagerness
        weight.zero_()
        weight[letters], weight[config.eos_token_id] = kept, last
    model.generation_config.pad_token_id = 0
    return model
