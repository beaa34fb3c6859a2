"""Whether a measured ratio is more than noise.

The interval of a median by order statistics asks nothing of the distribution (David and Nagaraja,
Order Statistics, section 7.1): of n independent values, k lie below the median with the chance of k
heads in n tosses of a coin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one way is as another, over units that were decoded in both.

    Attributes:
        median, low, high: over the units; low to high holds the true median with a confidence of at
            least 95%, and both are None with fewer than 6 units, which cannot tell.
        least, most: the extreme units.
    """

    median: float
    low: float | None
    high: float | None
    least: float
    most: float

    @property
    def within_noise(self) -> bool | None:
        """Whether 1 is as likely as not; None where there are too few units to tell."""
        return None if self.low is None or self.high is None else self.low <= 1 <= self.high


@dataclass(frozen=True)
class Gain:
    """How much τ rises, and its standard error, paired by prompts."""

    tau: float
    se: float

    def beyond(self, errors: float) -> bool:
        """Whether it rises by more than so many standard errors."""
        return self.tau > errors * self.se and self.tau > 0


def paired_gain(before: np.ndarray, after: np.ndarray) -> Gain:
    """What a change gains on the same prompts, or groups of prompts that are not independent.

    τ is a ratio of sums over prompts, so with prompt j's residual e_j = (s_j - τ n_j) / mean n of
    each way, the difference of both has variance Σ (e'_j - e_j)² / (m (m - 1)) over m prompts
    (Cochran, Sampling Techniques, chapter 6, as a paired difference).

    Args:
        before, after: [m, 2], tokens and rounds. With fewer than two prompts, or no round, nothing
            is gained.

    >>> paired_gain(np.array([[20, 10], [30, 10]]), np.array([[22, 10], [34, 10]]))
    Gain(tau=0.3, se=0.1)
    """
    if len(before) < 2 or not (before.sum(0)[1] and after.sum(0)[1]):
        return Gain(0.0, math.inf)
    taus, residuals = [], []
    for counts in (before, after):
        tokens, rounds = counts.T.astype(float)
        taus.append(tokens.sum() / rounds.sum())
        residuals.append((tokens - taus[-1] * rounds) / rounds.mean())
    differences, m = residuals[1] - residuals[0], len(before)
    se = math.sqrt(float((differences**2).sum()) / (m * (m - 1)))
    return Gain(round(float(taus[1] - taus[0]), 12), round(se, 12))


def compare(slow: Sequence[float], fast: Sequence[float]) -> Ratio | None:
    """How many times as fast the second way is as the first, by their times in equal units.

    A unit in which one of them has nothing to time is NaN, and left out; None if all are.

    >>> compare([2.0, 3.0, math.nan], [1.0, 1.0, 1.0])
    Ratio(median=2.5, low=None, high=None, least=2.0, most=3.0)
    """
    ratios = [a / b for a, b in zip(slow, fast, strict=True) if not math.isnan(a + b)]
    if not ratios:
        return None
    low, high = median_interval(ratios) or (None, None)
    return Ratio(median(ratios), low, high, min(ratios), max(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest symmetric interval of order statistics with a confidence of at least 95%.

    >>> median_interval([5, 1, 3, 2, 4, 6]), median_interval([1, 2, 3, 4, 5])
    ((1, 6), None)
    """
    count, ordered, found = len(values), sorted(values), None
    below = 0.0  # the chance that at most `rank` values lie below the median
    for rank in range((count + 1) // 2):
        below += math.comb(count, rank) / 2**count
        if 1 - 2 * below < CONFIDENCE:
            break
        found = ordered[rank], ordered[count - 1 - rank]
    return found
