"""Log-probabilities of the tokens that rounds emit, which travel in the rounds' reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from headstart.heads.core import best_log_probabilities


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Natural logarithms of the target's own probabilities, before any processor or temperature.

    A is new columns of text; NaN and id -1 stand behind a row's end.

    Attributes:
        chosen: [B, A] float64, of each token of the text.
        best_ids: [B, A, k] int64, the k most likely tokens in its place, the likeliest first.
        best: [B, A, k] float64, theirs.
    """

    chosen: np.ndarray
    best_ids: np.ndarray
    best: np.ndarray

    @classmethod
    def pack(cls, logits: Tensor, path: Tensor, tokens: Tensor, most: int) -> list[Tensor]:
        """Those of a round as whole numbers, on the device, for its report; see `unpack`.

        Args:
            logits: [B, N, V]; path: [B, A] of nodes; tokens: [B, A] after them; most: k.
        """
        at = path.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        rows = logits.gather(1, at)  # [B, A, V]
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        own = rows.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).double()
        chosen = own - rows.logsumexp(-1, keepdim=True)
        if not most:
            return [chosen.view(torch.int64)]
        best, ids = best_log_probabilities(rows, most)
        return [chosen.view(torch.int64), ids, best.double().view(torch.int64)]

    @classmethod
    def unpack(
        cls, packed: np.ndarray, batch: int, steps: int, most: int
    ) -> tuple[Self, np.ndarray]:
        """Those that a report begins with, and what follows them in it."""
        size, sizes = batch * steps, (batch, steps, most)
        ends = np.cumsum([size, size * most, size * most])
        chosen, ids, best, rest = np.split(packed, ends)
        chosen = chosen.view(np.float64).reshape(batch, steps)
        return cls(chosen, ids.reshape(sizes), best.view(np.float64).reshape(sizes)), rest

    def of_row(self, row: int, most: int) -> Self:
        """Those of one row, with at most so many of the most likely tokens: [1, A]."""
        only = slice(row, row + 1)
        return type(self)(
            self.chosen[only], self.best_ids[only, :, :most], self.best[only, :, :most]
        )

    def first(self, count: int) -> Self:
        """Those of the first `count` columns."""
        return type(self)(self.chosen[:, :count], self.best_ids[:, :count], self.best[:, :count])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of one text, of the columns of all parts."""
        return cls(
            np.concatenate([each.chosen for each in parts], 1),
            np.concatenate([each.best_ids for each in parts], 1),
            np.concatenate([each.best for each in parts], 1),
        )
