"""Random numbers that are functions of a seed, a position and a token.

They come from a counter: the same (seed, position, token) always gives the same number. There is no
generator and so no state: a row decodes alike alone, in any batch, and with any tree.

On CUDA the noise of scores, and the best of them, take one launch or two, see `noise_kernels`, and
no memory but the result's. With torch's operators they take some fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .fused_products import has_kernels

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX = (-4658895280553007687, -7723592293110705685)  # its two multipliers


def _splitmix(state: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014) on int64, whose product wraps."""
    for shift, multiplier in zip((30, 27), _MIX, strict=True):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def row_seeds(seed: int | Sequence[int], batch: int, device: torch.device | str = "cpu") -> Tensor:
    """One seed per row, [B] int64: a list is taken as it is, an int is spread over the rows.

    >>> row_seeds([3, 4], 2).tolist()
    [3, 4]
    """
    if isinstance(seed, int):
        rows = torch.arange(batch, device=device, dtype=torch.int64)
        return _splitmix((seed & (2**62 - 1)) + rows * _GOLDEN)
    return torch.tensor(list(seed), dtype=torch.int64, device=device)


class Stream(IntEnum):
    """Which draw a number is for; streams share no number."""

    TARGET = 0  # the target's own choice of a token, shared with the drafter by `coupled`
    CHILDREN = 1  # the drafter's independent draws of a node's children
    VERDICTS = 2  # accepting a node, and the token drawn at the end of a round

    @property
    def first(self) -> int:
        """What is added to token ids, or numbers of draws, for keys that no other stream uses."""
        return self << 40


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64 [B, M, V], keyed by (seed, position, token).

    Args:
        seeds: [B] int64; tokens: [V] or [B, M, V] int64, ids.
        positions: [B, M] int64, the absolute position that the draw decides.
    """
    row = _splitmix(seeds.unsqueeze(1) + _splitmix(positions + 1) * _GOLDEN)  # [B, M]
    bits = _splitmix(row.unsqueeze(-1) + (tokens + 1) * _GOLDEN)  # [B, M, V]
    # 52 bits and a half: the largest value stays below 1 after rounding, so the noise stays finite.
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [B, M, V]; arguments as for `uniform`.

    The argmax of log p + noise is a draw from p (Gumbel 1954; Maddison et al. 2014).
    """
    return -torch.log(-torch.log(uniform(seeds, positions, tokens)))


def place(positions: Tensor, nodes: Tensor) -> Tensor:
    """A key for a position and a node of the tree there, to be used in place of a position."""
    return positions + ((nodes + 1) << 32)


def add_noise(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor | None = None,
    stream: Stream = Stream.TARGET,
) -> Tensor:
    """Scores [B, M or 1, V] plus the Gumbel noise of positions [B, M or 1]: [B, M, V] float64.

    Args:
        seeds: [B].
        tokens: [V] or [B, M, V], the ids that the columns stand for; 0 … V - 1 when None.
    """
    if _has_kernels(scores):
        return _add_noise(scores, seeds, positions, tokens, stream)
    return _noisy(scores, seeds, positions, tokens, stream)


def best_with_noise(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The best tokens after the target's noise, [B, M]; arguments as for `add_noise`.

    It is -1 where a score is NaN, or the best one infinite.
    """
    if _has_kernels(scores):
        return _best_with_noise(scores, seeds, positions)
    return _best(_noisy(scores, seeds, positions, None, 0))


def _noisy(
    scores: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor | None, stream: int
) -> Tensor:
    if tokens is None:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
    first = Stream(stream).first
    return scores.double() + gumbel(seeds, positions, tokens + first if first else tokens)


def _best(noisy: Tensor) -> Tensor:
    best, token = noisy.max(-1)
    return token.masked_fill_((best - best).isnan(), -1)  # NaN, or nothing but one infinity


def _has_kernels(scores: Tensor) -> bool:
    return has_kernels(scores)


@torch.library.custom_op("headstart::add_noise", mutates_args=())
def _add_noise_launch(
    scores: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor | None, stream: int
) -> Tensor:
    if has_kernels(scores):
        from . import noise_kernels

        return noise_kernels.add_noise(scores, seeds, positions, tokens, stream)
    return _noisy(scores, seeds, positions, tokens, stream)


@torch.library.custom_op("headstart::best_with_noise", mutates_args=())
def _best_launch(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    if has_kernels(scores):
        from . import noise_kernels

        return noise_kernels.best_with_noise(scores, seeds, positions)
    return _best(_noisy(scores, seeds, positions, None, 0))


_add_noise: Any = _add_noise_launch
_best_with_noise: Any = _best_launch
