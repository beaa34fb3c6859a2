"""Random numbers from a counter: the same (seed, position, token) always gives the same number.

There is no generator and so no state: a row decodes alike alone, in any batch, and with any tree.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

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


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, keyed by (seed, position, token).

    Args:
        seeds: [B] int64.
        positions: [B, M] int64, the absolute position that the draw decides.
        tokens: [V] int64, token ids.

    Returns:
        [B, M, V] float64.
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


def in_stream(numbers: Tensor, stream: Stream) -> Tensor:
    """Token ids, or numbers of draws, as keys that no other stream uses."""
    return numbers + (stream << 40) if stream else numbers
