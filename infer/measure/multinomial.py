"""An exact test of counts against a distribution: it never fails a true one too often."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def multinomial_p_value(counts: Sequence[int], chances: Sequence[float]) -> float:
    """The probability, or more, that counts drawn with these chances differ from them as much.

    Given the counts before it, each count but the last is binomial, and the smaller of its tails
    doubled is an exact p-value. So under the true chances -2 Σ ln p is at most as large as
    chi-square with two degrees of freedom for each of them (Fisher's combination), however small
    the counts. Pearson's statistic is so only in the limit: with bins that expect 5 draws it
    passes its quantile of 1e-6 several times as often.

    Args:
        chances: that sum to 1; a bin that expects less than a few draws hardly ever rejects.

    >>> round(multinomial_p_value([60, 40], [0.5, 0.5]), 4)  # P(at most 40 or at least 60)
    0.0569
    """
    bins = [(n, p) for n, p in zip(counts, chances, strict=True) if n or p]
    if not all(p for _, p in bins):
        return 0.0  # what has no chance was drawn
    left, statistic = sum(counts), 0.0
    for place, (count, chance) in enumerate(bins[:-1]):
        # Summed anew: what is left of 1 after subtractions keeps little of tiny chances.
        rest = math.fsum(p for _, p in bins[place:])
        statistic -= 2 * _log_p_value(count, left, min(chance / rest, 1.0))
        left -= count
    tests = len(bins) - 1
    half = torch.tensor([tests, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half)) if tests else 1.0


def _log_p_value(count: int, draws: int, chance: float) -> float:
    """ln of twice the smaller tail of a binomial count, at most 0."""
    found = torch.arange(draws + 1, dtype=torch.float64)
    others, p = draws - found, torch.tensor(chance, dtype=torch.float64)
    log = math.lgamma(draws + 1) - torch.lgamma(found + 1) - torch.lgamma(others + 1)
    log += torch.special.xlogy(found, p) + torch.special.xlog1py(others, -p)
    tails = log[: count + 1].logsumexp(0), log[count:].logsumexp(0)
    return min(math.log(2) + min(map(float, tails)), 0.0)
