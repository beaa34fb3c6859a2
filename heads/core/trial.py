"""What a trial needs that shows whether one computation does the same as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers on the CPU, which leave the generators of requests as they are."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nearly_equal(one: Any, other: Tensor) -> bool:
    """Whether a tensor is like another one, but for how a few operators round."""
    if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    close = 4 * torch.finfo(one.dtype).eps if one.dtype.itemsize < 4 else 1e-5
    return bool((one - other).abs().max() <= close * one.abs().max())
