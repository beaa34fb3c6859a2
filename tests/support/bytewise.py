"""A tiny random Llama, its byte-level tokenizer and heads for it, saved as any are."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from headstart.heads import Manifest, family, fingerprint, save_drafter
from headstart.heads.artifacts.manifest import tokenizer_hash


def save_target(folder: Path, context: int = 256) -> tuple[Any, PreTrainedTokenizerFast]:
    """Save both into a folder; they write no end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=context, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for part in (tokenizer, model):
        part.save_pretrained(folder)
    return model, tokenizer


def save_heads(
    target: str,
    folder: Path,
    tree: str | None = "[[0], [1], [0, 0]]",
    name: str = "medusa",
    **options: Any,
) -> str:
    """Two random heads for the target, or another family's, saved as a training run saves them."""
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    kind: Any = family(name)
    options = {"heads": 2} if name == "medusa" else options
    drafter = kind(kind.config_class.for_target(model, **options)).bind(model)
    if name == "medusa":
        torch.nn.init.normal_(drafter.weight, std=0.2)
    manifest = Manifest(
        family=name,
        target=target,
        target_fingerprint=fingerprint(model),
        tokenizer_hash=tokenizer_hash(AutoTokenizer.from_pretrained(target)),
        recipe={"name": "small", "corpus": {"source": "texts.jsonl"}},
        metrics={"tau": 1.25, "acceptance_by_depth": [0.25, None], "steps": 7, "seconds": 3.0},
    )
    save_drafter(drafter, folder, manifest, "# card\n")
    if tree is not None:
        (folder / "tree.json").write_text(tree)
    return str(folder)
