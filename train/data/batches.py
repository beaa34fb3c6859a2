"""Batches of training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .training_rows import Row


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Items of `Rows` as a batch, padded on the right to the longest of them.

    Returns:
        `tokens` [B, T] int64, `supervised` [B, T] bool, false in the padding, and `rows` [B], their
        numbers.
    """
    tokens, supervised = ([item[name] for item in items] for name in ("tokens", "supervised"))
    return {
        "rows": torch.tensor([item["row"] for item in items]),
        "tokens": pad_sequence(tokens, batch_first=True),
        "supervised": pad_sequence(supervised, batch_first=True),
    }


def collate_texts(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows that are in no store as a batch: see `collate`; `rows` is None."""
    tokens, supervised = (
        [torch.from_numpy(getattr(row, name)) for row in rows] for name in ("tokens", "supervised")
    )
    return {
        "rows": None,
        "tokens": pad_sequence(tokens, batch_first=True).long(),
        "supervised": pad_sequence(supervised, batch_first=True),
    }
