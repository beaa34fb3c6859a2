"""Choosing tokens on a CPU: the best of scores, and Gumbel noise, in one pass each.

torch takes some twenty passes over the vocabulary for the noise, in float64, and a slow one for the
best of scores in bfloat16. `cpu_choices.h` does both; see `sampling` for what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_compile import Choice, kernels
from .cpu_kernels import plain


def best_tokens(scores: Tensor) -> Tensor | None:
    """See `sampling.argmax`; None where no kernel fits."""
    scores = scores.contiguous()
    if not scores.numel() or not plain(scores):
        return None
    size = scores.shape[-1]
    rows = scores.numel() // size
    best = torch.empty(scores.shape[:-1], dtype=torch.long)
    now = Choice(batch=1, rows=rows, size=size, score_rows=rows, threads=torch.get_num_threads())
    now.scores, now.best = scores.data_ptr(), best.data_ptr()
    kernels(scores.dtype).choose(now)
    return best


def with_noise(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor | None,
    first: int,
    choose: bool,
) -> Tensor | None:
    """Scores [B, M or 1, V] plus the noise of positions [B, M or 1]; None where no kernel fits.

    Args:
        seeds: [B]; tokens: [V] or [B, M, V], or None for 0 … V - 1.
        first: added to tokens, see `Stream`.
        choose: whether the best tokens alone are asked for.

    Returns:
        [B, M, V] float64, or the best of them, [B, M] int64, -1 where that is no finite number.
    """
    scores, positions, seeds = scores.contiguous(), positions.contiguous(), seeds.contiguous()
    if scores.dtype != torch.float32 or not scores.numel() or not plain(scores):
        return None
    tokens = None if tokens is None else tokens.contiguous()
    (batch, score_rows, size), position_rows = scores.shape, positions.shape[1]
    rows = max(score_rows, position_rows)
    now = Choice(
        scores.data_ptr(), seeds.data_ptr(), positions.data_ptr(),
        None if tokens is None else tokens.data_ptr(), None, None,
        batch, rows, size, score_rows, position_rows, tokens is not None and tokens.dim() > 1,
        first, torch.get_num_threads(),
    )  # fmt: skip
    if choose:
        made = torch.empty(batch, rows, dtype=torch.long)
        now.best = made.data_ptr()
    else:
        made = torch.empty(batch, rows, size, dtype=torch.float64)
        now.out = made.data_ptr()
    kernels(scores.dtype).choose(now)
    return made
