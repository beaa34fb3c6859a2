"""The scratch target: a byte-level BPE and a narrow, deep Llama, trained in about a minute.

It stands in for a fine-tuned model where there is no model hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.heads.core.files import write_atomically

from .data.corpus import load_documents
from .data.documents import Document
from .recipe import Scratch
from .scratch_training import TargetError, fit, next_token_loss

END_OF_TEXT = "<|endoftext|>"


def train_target(
    spec: Scratch,
    corpus_folder: Path,
    folder: Path,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Train tokenizer and model on a corpus folder and save both into `folder`.

    Writes what `save_pretrained` of model (float32) and tokenizer write, and `metrics.json`:
    tokens, steps, seconds, train_loss and held_out_loss (nats a token), held_out_top1. Stops at
    whichever comes first of `max_seconds` (of training steps, not of tokenizing) and `max_tokens`.
    With `max_seconds: null` and `max_tokens` given, a seed fixes the weights on one machine.
    Raises TargetError.
    """
    if spec.hidden_size % spec.heads or (spec.hidden_size // spec.heads) % 2:
        raise TargetError(
            f"target.scratch: hidden_size {spec.hidden_size} over heads {spec.heads} gives no even "
            "head size (rotary positions need one); change one of them"
        )
    if spec.max_seconds is None and spec.max_tokens is None:
        raise TargetError("target.scratch: give max_seconds or max_tokens; both are null")
    if spec.sequence_length >= spec.context:
        raise TargetError(
            f"target.scratch.sequence_length: found {spec.sequence_length}, expected less than "
            f"context, {spec.context}"
        )
    documents = load_documents(corpus_folder, "train")
    tokenizer = train_tokenizer(documents, spec.vocab_size, spec.context)
    tokens = pack(tokenizer, documents)
    model = build_model(spec, tokenizer, seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    metrics = fit(model, tokens, spec, seed, progress)
    held_out = load_documents(corpus_folder, "held_out")
    if held_out:
        metrics |= evaluate(model, pack(tokenizer, held_out), spec.sequence_length)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2).encode())
    return metrics


def train_tokenizer(
    documents: list[Document], vocab_size: int, context: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE (as GPT-2's) with one special token, the end of text, which also pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> Tensor:
    """All documents as one int64 array, each closed by the end of text.  # [T]"""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer([document.text for document in documents], verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, end]])


def build_model(spec: Scratch, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A float32 Llama of the recipe's shape with seeded random weights."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert isinstance(end, int)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def evaluate(
    model: LlamaForCausalLM, tokens: Tensor, length: int, max_rows: int = 128
) -> dict[str, float]:
    """Mean loss in nats a token and top-1 accuracy over rows spread evenly over `tokens` [T]."""
    length = min(length, len(tokens) - 1)
    available = (len(tokens) - 1) // length
    count = min(max_rows, available)
    starts = [i * available // count * length for i in range(count)]
    rows = torch.stack([tokens[start : start + length + 1] for start in starts])
    model.eval()
    loss = hits = 0.0
    with torch.no_grad():
        for batch in rows.to(model.device).split(16):
            logits = model(batch[:, :-1], use_cache=False).logits.float()  # [B, T, V]
            loss += float(next_token_loss(logits, batch[:, 1:], "sum"))
            hits += float((logits.argmax(-1) == batch[:, 1:]).sum())
    return {"held_out_loss": loss / (count * length), "held_out_top1": hits / (count * length)}
