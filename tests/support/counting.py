"""A target whose text is known: it counts. After token x it writes x + 1 modulo its vocabulary."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.medusa import Medusa, MedusaConfig

SIZE = 32


def counting_target() -> LlamaForCausalLM:
    """A Llama with an identity embedding, silent layers and an output layer that adds one."""
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.model.layers.parameters():
            parameter.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        target.lm_head.weight.copy_(ahead(1))
    return target


def ahead(steps: int) -> Tensor:
    """The output layer whose best token after x is x + steps.  # [V, D]"""
    return torch.eye(SIZE).roll(steps, 0)


def counting_drafter(target: LlamaForCausalLM, heads: int, off_by: int = 0) -> Medusa:
    """Heads that know what comes: head k adds k + 1, or `off_by` more."""
    drafter = Medusa(MedusaConfig.for_target(target, heads=heads, output="own"))
    drafter.bind(target)
    assert drafter.output is not None
    with torch.no_grad():
        for k in range(1, heads + 1):
            drafter.output[k - 1] = ahead(k + 1 + off_by)
    return drafter


def counting_rows(rows: int, length: int) -> Tensor:
    """Rows that count from different tokens.  # [rows, length]"""
    return (torch.arange(rows).unsqueeze(1) * 5 + torch.arange(length)) % SIZE
