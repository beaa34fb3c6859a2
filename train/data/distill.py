"""Self-distillation: the target continues real prefixes, and the drafter learns from what it wrote.

The result is a fixed number of logical shards, each written whole or not at all, so that a run
killed anywhere goes on with the missing ones, with any number of processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.core import row_seeds
from headstart.heads.core.files import write_atomically
from headstart.infer import Speculator

from ..recipe import Distill
from .documents import Document
from .prefixes import DistillError, Windows, make_prefixes

__all__ = [
    "DistillError", "Rows", "Windows", "check_context", "distill", "shard_rows", "summary",
    "true_lengths", "write_rows",
]  # fmt: skip

logger = logging.getLogger(__name__)


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

    Row i continues a prefix of the documents that is drawn by (seed, i), with sampling noise keyed
    by (seed, i), so a row is the same whichever process writes it, before or after a kill. After
    `spec.max_seconds` no further shard is begun, but each process writes at least one.

    Raises:
        DistillError: no document gives a prefix, or the target's context is too short.
    """
    prefixes = make_prefixes(spec, tokenizer, documents)
    check_context(spec, target)
    # Drawn for all rows at once: what row i gets does not depend on which shards are missing.
    drawn = prefixes.draw(spec.examples, seed)
    if spec.prefix != "window" and spec.temperature == 0 and len(prefixes) < spec.examples:
        logger.warning(
            "distill: %d examples of %d prefixes, so texts repeat", spec.examples, len(prefixes)
        )
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
        parts = []
        for ids in torch.tensor(shard_rows(spec, shard)).split(spec.batch_size):
            batch = [prefixes[drawn[i]] for i in ids.tolist()]
            parts.append(write_rows(speculator, batch, [seeds[i] for i in ids.tolist()], spec))
            bar.update(len(ids))
            speed = bar.n * spec.new_tokens / clock.elapsed()
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        _save(shard_path(folder, shard, spec.shards), parts, prefixes.skipped)
    bar.close()


def shard_rows(spec: Distill, shard: int) -> range:
    """The row ids of one shard: contiguous, and together all of them."""
    return range(spec.examples * shard // spec.shards, spec.examples * (shard + 1) // spec.shards)


def shard_path(folder: Path, shard: int, shards: int) -> Path:
    """Where a shard is written."""
    return folder / f"train-{shard:05d}-of-{shards:05d}.safetensors"


def summary(spec: Distill, folder: Path) -> dict[str, int]:
    """What was written in all: shards, rows and tokens; says in the log when time cut it short.

    `skipped`, where not 0, counts the documents or prompts that gave no prefix.
    """
    rows = Rows.load(folder)
    paths = [shard_path(folder, k, spec.shards) for k in range(spec.shards)]
    paths = [path for path in paths if path.exists()]
    if len(paths) < spec.shards:
        logger.warning(
            "distill: %d of %d examples, %d of %d shards, were written in %.0f s",
            len(rows), spec.examples, len(paths), spec.shards, spec.max_seconds or 0,
        )  # fmt: skip
    counts = {"shards": len(paths), "rows": len(rows), "tokens": int(rows.written.sum())}
    with safetensors.safe_open(paths[0], "pt") as shard:
        skipped = int((shard.metadata() or {}).get("skipped", 0))
    if skipped:
        kind = "prompts are empty or longer" if spec.prefix == "prompt" else "documents are shorter"
        logger.warning(
            "distill: %d %s than distill.prefix_tokens %d, and were skipped",
            skipped, kind, spec.prefix_tokens,
        )  # fmt: skip
        counts["skipped"] = skipped
    return counts


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


def check_context(spec: Distill, writer: PreTrainedModel, name: str = "target") -> None:
    """Raise DistillError where rows are longer than the context of who writes them."""
    wanted = spec.prefix_tokens + spec.new_tokens
    context = getattr(writer.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and wanted > context:
        raise DistillError(
            f"distill.prefix_tokens {spec.prefix_tokens} and new_tokens {spec.new_tokens} make "
            f"{wanted} tokens, but the {name}'s context is {context}; lower one of them."
        )


def write_rows(
    speculator: Speculator,
    prefixes: Sequence[Tensor],
    seeds: list[int],
    spec: Distill,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue prefixes [P] of any length.

    Args:
        seeds: one a row, of its sampling noise.
        options: further ones of `generate`, such as another `eos_token_id` than the model's.

    Returns:
        On the CPU: the text [B, prefix_tokens + new_tokens], each row from column 0 on, its
        length [B], and its prefix's length [B].
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if spec.temperature > 0:
        # generate's default, or the model's own config, would cut what is to be learnt.
        whole = {"top_k": 0, "top_p": 1.0}
        sampling = {"do_sample": True, "temperature": spec.temperature, "seed": seeds, **whole}
    config: Any = speculator.model.generation_config
    end = options.get("eos_token_id", config.eos_token_id)
    counts = torch.tensor([len(prefix) for prefix in prefixes])
    width = int(counts.max())
    pads = width - counts  # [B], on the left
    padded = [functional.pad(p, (width - len(p), 0)) for p in prefixes]
    device = speculator.model.device
    text = speculator.generate(
        torch.stack(padded).to(device),
        attention_mask=(torch.arange(width) >= pads.unsqueeze(1)).long().to(device),
        max_new_tokens=spec.new_tokens,
        **sampling,
        **options,
    ).cpu()
    lengths = true_lengths(text, end, width) - pads
    # Training rows are padded on the right; the batch may also have ended early.
    columns = torch.arange(spec.prefix_tokens + spec.new_tokens)
    source = (columns + pads.unsqueeze(1)).clamp(max=text.shape[1] - 1)
    tokens = text.gather(1, source).masked_fill(columns >= lengths.unsqueeze(1), 0)
    return tokens, lengths, counts


def true_lengths(text: Tensor, end: int | list[int] | None, prefix: int) -> Tensor:
    """Tokens of each row up to its first end-of-text after the prefix, that one included.  # [B]"""
    if end is None:
        return torch.full((len(text),), text.shape[1])
    ends = torch.isin(text[:, prefix:], torch.tensor(end, device=text.device))  # [B, new]
    cut = torch.where(ends.any(1), ends.byte().argmax(1) + 1, ends.shape[1])
    return prefix + cut


def _save(path: Path, parts: Sequence[tuple[Tensor, Tensor, Tensor]], skipped: int) -> None:
    names = ("tokens", "length", "prompt_length")
    columns = zip(names, zip(*parts, strict=True), strict=True)
    data = {name: torch.cat(column).int() for name, column in columns}
    write_atomically(path, safetensors.torch.save(data, {"skipped": str(skipped)}))


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
        """All shards of a folder, in order, without rows in which the target wrote nothing."""
        shards = [safetensors.torch.load_file(f) for f in sorted(folder.glob("*.safetensors"))]
        if not shards:
            raise DistillError(f"{folder} holds no shard; run again with --fresh.")
        names = ("tokens", "length", "prompt_length")
        columns = [torch.cat([shard[name] for shard in shards]) for name in names]
        taught = columns[1] > columns[2]
        if not taught.all():
            logger.warning("%d rows without a written token skipped", int((~taught).sum()))
        if not taught.any():
            raise DistillError(f"{folder}: the target wrote no token in any row; run with --fresh.")
        return cls(*(column[taught] for column in columns))

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
