"""The scratch target: a byte-level BPE and a narrow, deep Llama, trained in about a minute.

It stands in for a fine-tuned model where there is no model hub. The learning rate follows the share
of the budget of time or tokens that is used, so a slower machine sees fewer tokens and still ends
at a learning rate of zero.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.heads.core.files import write_atomically
from headstart.infer.measure.progress import progress_bar

from .data.corpus import load_documents
from .data.documents import Document
from .data.tokenising import tokenise
from .muon import muon
from .recipe import Scratch

END_OF_TEXT = "<|endoftext|>"


class TargetError(ValueError):
    """A scratch target that cannot be trained as asked."""


def train_target(
    spec: Scratch, corpus_folder: Path, folder: Path, seed: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Train tokenizer and model on a corpus folder and save both into `folder`.

    Writes what `save_pretrained` of model (float32) and tokenizer write, and `metrics.json`:
    tokens, steps, seconds, train_loss and held_out_loss (nats a token), held_out_top1, parameters.
    Stops at whichever comes first of `max_seconds` (of training steps, not of tokenizing) and
    `max_tokens`; until `min_tokens` are learnt it goes on, up to twice `max_seconds`.
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
    model = build_model(spec, tokenizer, seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    metrics = fit(model, pack(tokenizer, documents), spec, seed, progress)
    held_out = load_documents(corpus_folder, "held_out")
    if held_out:
        metrics |= evaluate(model, pack(tokenizer, held_out), spec.sequence_length)
        _check_loss(metrics["held_out_loss"], "after its last step", spec)
    metrics["parameters"] = model.num_parameters()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2).encode())
    return metrics


def train_tokenizer(
    documents: Sequence[Document], vocab_size: int, context: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE (as GPT-2's) with one special token, the end of text, which also pads."""
    texts = (document.text for document in documents)
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, vocab_size, [END_OF_TEXT]),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def byte_level_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE of texts; its first ids are those of the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> Tensor:
    """All documents as one int64 array, each closed by the end of text.  # [T]"""
    end: Any = tokenizer.eos_token_id
    rows = tokenise(tokenizer, ((document.text, True) for document in documents))
    return torch.from_numpy(np.insert(rows.ids.astype(np.int64), rows.starts + rows.lengths, end))


def build_model(spec: Scratch, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A float32 Llama of the recipe's shape with seeded random weights."""
    config = model_config(spec, len(tokenizer), tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def model_config(spec: Scratch, vocab_size: int, end: Any = None) -> LlamaConfig:
    """The config of the model; `end` is the id of its end token."""
    return LlamaConfig(
        vocab_size=vocab_size,
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


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: Tensor, length: int) -> dict[str, float]:
    """Loss in nats a token and top-1 accuracy on at most 128 rows, spread evenly over `tokens`."""
    length = min(length, len(tokens) - 1)
    available = (len(tokens) - 1) // length
    count = min(128, available)
    starts = [i * available // count * length for i in range(count)]
    rows = torch.stack([tokens[start : start + length + 1] for start in starts])
    model.eval()
    loss = hits = 0.0
    for batch in rows.to(model.device).split(16):
        logits = model(batch[:, :-1], use_cache=False).logits.float()  # [B, T, V]
        loss += float(next_token_loss(logits, batch[:, 1:], "sum"))
        hits += float((logits.argmax(-1) == batch[:, 1:]).sum())
    return {"held_out_loss": loss / (count * length), "held_out_top1": hits / (count * length)}


def fit(
    model: LlamaForCausalLM, tokens: Tensor, spec: Scratch, seed: int, progress: bool
) -> dict[str, Any]:
    """Train in place on a corpus `tokens` [T]; returns tokens, steps, seconds and train_loss.

    Where there is a GPU, products are computed in bfloat16; weights and the optimizers' state stay
    float32. Raises TargetError.
    """
    length = spec.sequence_length
    if len(tokens) <= length:
        raise TargetError(
            f"the corpus has {len(tokens)} tokens, expected more than "
            f"target.scratch.sequence_length, {length}; use more text or a shorter sequence"
        )
    # Muon is not meant for the embedding and the output layer, whose rows are tokens.
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    inside = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = (
        muon(hidden, spec.muon_lr),
        torch.optim.AdamW(others, lr=spec.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    rows = Rows(tokens, length, seed)
    clock = Clock(
        spec.max_seconds, spec.max_tokens, spec.batch_size * length, time.perf_counter(),
        spec.min_tokens,
    )  # fmt: skip
    losses, recent = [], 0.0
    model.train()
    with closing(progress_bar(1.0, "target", disable=not progress)) as bar:
        # At least one step, then none that would end past the budget.
        while not losses or clock.share(steps_ahead=1.0) <= 1.0:
            batch = rows.take(spec.batch_size).to(model.device)  # [B, T + 1]
            scale = schedule(clock.share(steps_ahead=0.5), spec.warmup_ratio)
            for group, rate in rates:
                group["lr"] = rate * scale
            with torch.autocast(
                model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"
            ):
                logits = model(batch[:, :-1], use_cache=False).logits  # [B, T, V]
                loss = next_token_loss(logits, batch[:, 1:])
            losses.append(loss.item())
            _check_loss(losses[-1], f"in step {len(losses)}", spec)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            clock.steps += 1
            recent = sum(losses[-20:]) / len(losses[-20:])
            bar.set_postfix_str(f"loss {recent:.3f}", refresh=False)
            bar.update(min(clock.share(), 1.0) - bar.n)
        bar.update(1.0 - bar.n)
    return {
        "tokens": clock.steps * clock.step_tokens,
        "steps": clock.steps,
        "seconds": time.perf_counter() - clock.started,
        "train_loss": recent,
    }


def _check_loss(loss: float, when: str, spec: Scratch) -> None:
    if not math.isfinite(loss):
        raise TargetError(
            f"the target's loss is {loss} {when}; lower target.scratch.adamw_lr "
            f"({spec.adamw_lr:g}) or target.scratch.muon_lr ({spec.muon_lr:g})"
        )


@dataclass
class Clock:
    """How far training is, in time and tokens; a step counts as done once it has ended."""

    max_seconds: float | None
    max_tokens: int | None
    step_tokens: int
    started: float
    min_tokens: int | None = None
    steps: int = 0

    def share(self, steps_ahead: float = 0.0) -> float:
        """Elapsed share of the budget, `steps_ahead` steps of average length from now."""
        shares = [0.0]
        tokens = (self.steps + steps_ahead) * self.step_tokens
        if self.max_seconds is not None:
            elapsed = time.perf_counter() - self.started
            ahead = steps_ahead * elapsed / max(self.steps, 1)
            time_share = (elapsed + ahead) / self.max_seconds
            if self.min_tokens is not None:
                time_share = max(min(time_share, tokens / self.min_tokens), time_share / 2)
            shares.append(time_share)
        if self.max_tokens is not None:
            shares.append(tokens / self.max_tokens)
        return max(shares)


def schedule(share: float, warmup: float) -> float:
    """Learning-rate factor after `share` of the budget: a linear rise, then linearly to zero."""
    if share < warmup:
        return share / warmup
    return max(0.0, (1.0 - share) / (1.0 - warmup))


class Rows:
    """Rows of `length + 1` tokens without overlap of inputs, shuffled anew in every epoch."""

    def __init__(self, tokens: Tensor, length: int, seed: int) -> None:
        self.tokens, self.length = tokens, length
        self.generator = torch.Generator().manual_seed(seed)
        self.starts: list[int] = []

    def take(self, count: int) -> Tensor:
        """The next rows.  # [B, T + 1]"""
        rows = []
        for _ in range(count):
            if not self.starts:
                # A random offset, so that the rows of the next epoch are cut at other places.
                spare = (len(self.tokens) - 1) % self.length
                offset = int(torch.randint(spare + 1, (), generator=self.generator))
                total = (len(self.tokens) - 1 - offset) // self.length
                order = torch.randperm(total, generator=self.generator)
                self.starts = (offset + order * self.length).tolist()
            start = self.starts.pop()
            rows.append(self.tokens[start : start + self.length + 1])
        return torch.stack(rows)


def next_token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    #  inputs  x0 x1 x2 …
    #  labels  x1 x2 x3 …      the row has one token more than the inputs
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
