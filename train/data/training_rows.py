"""The rows that a drafter is trained on: prefixes, and what the target wrote after them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .prefixes import DistillError

logger = logging.getLogger(__name__)

COLUMNS = ("tokens", "length", "prompt_length")
"""The tensors of a shard: [n, T], [n] and [n], int32."""


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
        columns = [torch.cat([shard[name] for shard in shards]) for name in COLUMNS]
        written = columns[1] > columns[2]
        if not written.all():
            logger.warning("%d rows without a written token skipped", int((~written).sum()))
        if not written.any():
            raise DistillError(f"{folder}: the target wrote no token in any row; run with --fresh.")
        return cls(*(column[written] for column in columns))

    def __post_init__(self) -> None:
        steps = torch.arange(self.tokens.shape[1])
        after_prompt = steps >= self.prompt_lengths.unsqueeze(1)
        self.written = after_prompt & (steps < self.lengths.unsqueeze(1))  # [n, T]

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
