"""Self-distillation: the target continues real prefixes, and the drafter learns from what it wrote.

The result is a fixed number of logical shards, each written whole or not at all, so that a run
killed anywhere goes on with the missing ones, with any number of processes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.core import row_seeds
from headstart.infer import Speculator

from .corpus import Document
from .recipe import Distill
from .stages import write_atomically

logger = logging.getLogger(__name__)


class DistillError(ValueError):
    """Self-distillation that cannot be done as asked."""


class Windows:
    """Every window of `length` tokens that lies within one document.

    Windows are numbered through all documents; short documents have none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], length: int
    ):
        texts = [document.text for document in documents]
        self.rows: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"] if texts else []
        self.length = length
        self.ends = list(accumulate(max(len(row) - length + 1, 0) for row in self.rows))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: int) -> Tensor:
        """Window `number`.  # [length]"""
        row = bisect_right(self.ends, number)
        start = number - (self.ends[row - 1] if row else 0)
        return torch.tensor(self.rows[row][start : start + self.length])


def distill(
    spec: Distill,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    progress: bool = True,
) -> None:
    """Let the target write this process's share of the missing shards into `folder`.

    Row i continues a window of the documents that is drawn by (seed, i), with sampling noise keyed
    by (seed, i), so a row is the same whichever process writes it, before or after a kill. After
    `spec.max_seconds` no further shard is begun, but each process writes at least one.

    Raises:
        DistillError: no document is long enough for a prefix.
    """
    windows = Windows(tokenizer, documents, spec.prefix_tokens)
    if not len(windows):
        raise DistillError(
            f"distill.prefix_tokens is {spec.prefix_tokens}, and none of the {len(documents)} "
            "training documents has so many tokens; use a shorter prefix or longer documents."
        )
    # Drawn for all rows at once: what row i gets does not depend on which shards are missing.
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(windows), (spec.examples,), generator=generator).tolist()
    seeds = row_seeds(seed, spec.examples).tolist()
    speculator = Speculator(target)
    # By number, not by turn among the missing: the processes look at different moments.
    own = range(rank, spec.shards, world)
    own = [k for k in own if not shard_path(folder, k, spec.shards).exists()]
    clock = _Clock(spec.max_seconds)
    rows_due = sum(len(shard_rows(spec, shard)) for shard in own)
    bar = tqdm(total=rows_due, desc="distill", unit="row", disable=not progress)
    for done, shard in enumerate(own):
        if done and clock.would_pass(done):
            break
        tokens, lengths = [], []
        for ids in torch.tensor(shard_rows(spec, shard)).split(spec.batch_size):
            batch = torch.stack([windows[starts[i]] for i in ids.tolist()])  # [B, P]
            text = _write(speculator, batch, [seeds[i] for i in ids.tolist()], spec)  # [B, T]
            tokens.append(text)
            lengths.append(true_lengths(text, target, spec.prefix_tokens))
            bar.update(len(ids))
            speed = bar.n * spec.new_tokens / clock.elapsed()
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        _save(shard_path(folder, shard, spec.shards), tokens, lengths, spec.prefix_tokens)
    bar.close()


def shard_rows(spec: Distill, shard: int) -> range:
    """The row ids of one shard: contiguous, and together all of them."""
    return range(spec.examples * shard // spec.shards, spec.examples * (shard + 1) // spec.shards)


def shard_path(folder: Path, shard: int, shards: int) -> Path:
    """Where a shard is written."""
    return folder / f"train-{shard:05d}-of-{shards:05d}.safetensors"


def summary(spec: Distill, folder: Path) -> dict[str, int]:
    """What was written in all: shards, rows and tokens; says in the log when time cut it short."""
    rows = Rows.load(folder)
    found = sum(shard_path(folder, k, spec.shards).exists() for k in range(spec.shards))
    if found < spec.shards:
        logger.warning(
            "distill: %d of %d examples, %d of %d shards, were written in %.0f s",
            len(rows), spec.examples, found, spec.shards, spec.max_seconds or 0,
        )  # fmt: skip
    return {"shards": found, "rows": len(rows), "tokens": int(rows.written.sum())}


@dataclass
class _Clock:
    """Whether one shard more would pass the limit, judged by the mean of those done."""

    limit: float | None

    def __post_init__(self) -> None:
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def would_pass(self, done: int) -> bool:
        return self.limit is not None and self.elapsed() * (done + 1) / done > self.limit


def _write(speculator: Speculator, prompts: Tensor, seeds: list[int], spec: Distill) -> Tensor:
    """Prompts [B, P] with their continuations, on the CPU.  # [B, P + new_tokens]"""
    sampling = {"do_sample": False}
    if spec.temperature > 0:
        # top_k=0: generate's default of 50 would cut the distribution that is to be learnt.
        sampling = {"do_sample": True, "temperature": spec.temperature, "top_k": 0, "seed": seeds}
    text = speculator.generate(
        prompts.to(speculator.model.device),
        attention_mask=torch.ones_like(prompts).to(speculator.model.device),
        max_new_tokens=spec.new_tokens,
        **sampling,
    )
    width = prompts.shape[1] + spec.new_tokens  # the batch may have ended early
    return torch.nn.functional.pad(text.cpu(), (0, width - text.shape[1]))


def true_lengths(text: Tensor, target: PreTrainedModel, prefix: int) -> Tensor:
    """Tokens of each row up to its first end-of-text after the prefix, that one included.  # [B]"""
    end = target.generation_config.eos_token_id  # type: ignore[union-attr]
    if end is None:
        return torch.full((len(text),), text.shape[1])
    ends = torch.isin(text[:, prefix:], torch.tensor(end, device=text.device))  # [B, new]
    cut = torch.where(ends.any(1), ends.byte().argmax(1) + 1, ends.shape[1])
    return prefix + cut


def _save(path: Path, tokens: list[Tensor], lengths: list[Tensor], prefix: int) -> None:
    length = torch.cat(lengths).int()
    data = {
        "tokens": torch.cat(tokens).int(),
        "length": length,
        "prompt_length": torch.full_like(length, prefix),
    }
    write_atomically(path, safetensors.torch.save(data))


@dataclass
class Rows(Dataset):
    """Training rows: tokens [n, T] int32, lengths [n] and prompt_lengths [n].

    An item is a dict: `rows` its number, `tokens` [T] int64, and `supervised` [T] bool, which is
    true where the target wrote the token.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """All shards of a folder, in order."""
        shards = [safetensors.torch.load_file(f) for f in sorted(folder.glob("*.safetensors"))]
        if not shards:
            raise DistillError(f"{folder} holds no shard; run again with --fresh.")
        names = ("tokens", "length", "prompt_length")
        return cls(*(torch.cat([shard[name] for shard in shards]) for name in names))

    def __post_init__(self) -> None:
        steps = torch.arange(self.tokens.shape[1])
        begun = steps >= self.prompt_lengths.unsqueeze(1)
        self.written = begun & (steps < self.lengths.unsqueeze(1))  # [n, T]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {
            "rows": torch.tensor(number),
            "tokens": self.tokens[number].long(),
            "supervised": self.written[number],
        }

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token.  # [V]"""
        return torch.bincount(self.tokens[self.written].long(), minlength=vocab_size)
