"""The logits processors of transformers, sorted by what they read, and two of them rebuilt."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""The processors that a drafter's proposals follow too: functions of one row of logits alone."""

ROWWISE = (
    *WARPERS,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    TopHLogitsWarper,
    SuppressTokensLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
)
"""All processors of transformers that are functions of one row of logits alone."""

STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Processors that count on one call for each token of the text, in order, for the whole batch."""


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """What the repetition penalty (Keskar et al. 2019, arXiv 1909.05858) makes of scores.

    Args:
        scores: [..., V]; seen: [..., V] bool, the tokens that are penalised.

    >>> scores, seen = torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    >>> penalise(scores, seen, 2.0).tolist()
    [[1.5, -4.0, 1.0]]
    """
    less = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, less, scores)


class OnlyRows(LogitsProcessor):
    """A user's `prefix_allowed_tokens_fn`, asked about some rows alone; the others may do all."""

    def __init__(self, asked: PrefixConstrainedLogitsProcessor, rows: Sequence[bool]):
        self.function, self.rows = asked._prefix_allowed_tokens_fn, rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        everything = list(range(scores.shape[-1]))

        def allowed(row: int, text: Tensor) -> list[int]:
            return self.function(row, text) if self.rows[row] else everything

        return PrefixConstrainedLogitsProcessor(allowed, 1)(input_ids, scores)  # type: ignore[arg-type]
