"""The best tokens of each row of scores, and their log-probabilities.

On CUDA the parts of a row are searched side by side, in two launches, see `best_kernels`: torch's
`topk` and `logsumexp` take some fifteen, and few of a GPU's multiprocessors for few rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .triton_here import has_triton

_MOST = 16  # tokens of a row; a launch looks through its part once for each of them


def best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)`, of numbers [..., V]: the best of each row, and their places.

    Where a kernel finds them, equal ones come in the order of their places, and all values of a row
    that holds a NaN are NaN.

    >>> [found.tolist() for found in best_of(torch.tensor([[2.0, 7.0, 1.0]]), 2)]
    [[[7.0, 2.0]], [[1, 0]]]
    """
    if _has_kernels(scores, count):
        return _best(scores, count)
    return _topk(scores, count)


def best_log_probabilities(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `best_of`, but the log-softmax of the values, computed in float32 at least: float64.

    >>> values, _ = best_log_probabilities(torch.tensor([[0.5, 0.125, 0.375]]).log(), 2)
    >>> values.exp().round(decimals=3).tolist()
    [[0.5, 0.375]]
    """
    if _has_kernels(scores, count):
        return _best_logs(scores, count)
    return _logs(scores, count)


def _topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found = scores.max(-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1)
    return found[0], found[1]


def _logs(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    values, places = _topk(scores, count)
    return values.double() - scores.logsumexp(-1, keepdim=True), places


def _has_kernels(scores: Tensor, count: int) -> bool:
    return count <= _MOST and has_triton(scores)


@torch.library.custom_op("headstart::best_of", mutates_args=())
def _best_launch(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if has_triton(scores):
        from . import best_kernels

        return best_kernels.best_of(scores, count)
    return _topk(scores, count)


@torch.library.custom_op("headstart::best_log_probabilities", mutates_args=())
def _logs_launch(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if has_triton(scores):
        from . import best_kernels

        return best_kernels.best_of(scores, count, logs=True)
    return _logs(scores, count)


_best: Any = _best_launch
_best_logs: Any = _logs_launch
