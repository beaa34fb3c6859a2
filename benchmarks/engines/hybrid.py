"""A small Qwen3-Next on the quickstart's text: a target whose files hold a module for MTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

from headstart.train.data.corpus import load_documents
from headstart.train.recipe import Scratch
from headstart.train.scratch_target import fit, pack


def train_hybrid(quickstart: Path, folder: Path, seconds: int) -> None:
    """Train it with the quickstart's tokenizer, and save both into a folder.

    Args:
        quickstart: the folder of the run.
    """
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "target")
    sizes: Any = dict(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"] * 2, full_attention_interval=2,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=256,
        shared_expert_intermediate_size=256, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).float()
    text = pack(tokenizer, load_documents(quickstart / "corpus", "train"))
    fit(model, text, Scratch(max_seconds=float(seconds)), 0, True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
