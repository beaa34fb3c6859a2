"""Top-p without sorting the vocabulary, in one launch on a GPU.

The warper of transformers sorts all V scores of a row, and takes the running sum of their softmax:
some sixteen launches, for a set that is the scores above one number. On CUDA the number is searched
for instead, see `nucleus_kernels`; elsewhere, and in float64, the warper itself is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from .fused_products import has_kernels


@torch.library.custom_op("headstart::top_p", mutates_args=())
def top_p(scores: Tensor, share: Tensor, filter_value: float) -> Tensor:
    """What `TopPLogitsWarper` makes of scores [M, V], its p being `share`, float64: [] or [M].

    From the least score up, equal ones by their number, a token goes while the sum of it and of
    those that went is at most 1 - p; the last one stays. Rows with a NaN stay what they are.

    >>> scores = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log()
    >>> top_p(scores, torch.tensor(0.8).double(), 0.0).exp().tolist()
    [[0.5, 1.0, 0.25, 0.125]]
    """
    if has_kernels(scores):
        from . import nucleus_kernels

        return nucleus_kernels.top_p(scores, share, filter_value)
    if share.dim():
        return _by_sorting(scores, share, filter_value)
    warper: Any = TopPLogitsWarper(0.0, filter_value)
    warper.top_p = share
    return warper(None, scores)


_launch: Any = top_p


def top_p_by_row(scores: Tensor, shares: Tensor) -> Tensor:
    """What `TopPLogitsWarper` makes of scores [M, V] with a p for each row, [M] float64."""
    if _has_kernels(scores):
        return _launch(scores, shares, -torch.inf)
    return _by_sorting(scores, shares, -torch.inf)


def _by_sorting(scores: Tensor, shares: Tensor, filter_value: float) -> Tensor:
    ordered, tokens = scores.sort(dim=-1)
    gone = ordered.softmax(-1).cumsum(-1) <= (1 - shares).unsqueeze(1).to(scores.dtype)
    gone[:, -1] = False
    return scores.masked_fill(gone.scatter(1, tokens, gone), filter_value)


def warped(processor: Any, scores: Tensor) -> Tensor:
    """What a processor that reads rows of scores [M, V] alone makes of them."""
    if _searches(processor, scores):
        share = processor.top_p
        if not isinstance(share, Tensor):
            share = torch.full((), share, dtype=torch.float64, device=scores.device)
        return _launch(scores, share, processor.filter_value)
    return processor(None, scores)


def _searches(processor: Any, scores: Tensor) -> bool:
    mine = type(processor) is TopPLogitsWarper and processor.min_tokens_to_keep == 1
    return mine and _has_kernels(scores)


def _has_kernels(scores: Tensor) -> bool:
    return has_kernels(scores) and scores.dtype == torch.float32
