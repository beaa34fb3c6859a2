"""How deep the next tree is, where that follows what is accepted and what rounds take.

A round of depth d is expected to emit 1 + p1 + p1·p2 + … + p1·…·pd tokens of a row, where pk is the
share of rows that accept a node of depth k after its parent. The depth is taken whose rounds emit
most per second. Recent rounds count more for the shares; seconds are measured as rounds run, so
they hold for this machine, batch and length of text. The text depends on neither: only rules take
part under which it is that of plain decoding.

The same idea is in Liu et al. 2024 (arXiv 2406.14066), which calls tokens per second goodput.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from .trees.policy import Policy

_UNKNOWN = 0.7  # the shares before any text
_PRIOR = 5.0  # rounds that the shares of earlier texts count for
_SLOW = 0.99  # of what a round counts for in these, from one round to the next
_DECAY = 0.95  # the same in those of a text

_TIMED = 2  # rounds of a depth that are timed before its time is believed
_WINDOW = 9  # the last times of a depth count; those before a pause of so many rounds do not:
_PAUSE = 64
_ANEW = 0.01  # of the time is spent on measuring the other depths anew
_TRIED = 0.03  # of the time of plain rounds is spent on drafting, to see whether it pays again

PLAIN_ROUNDS = 32
"""At most so many plain rounds come in a row; after the next one, drafters take in all tokens."""


class Shares:
    """The shares p1 … pD of rows that accept a node of each depth after its parent.

    Args:
        known: to begin with.
        decay: of what a round counts for, from one round to the next.
    """

    def __init__(self, known: Sequence[float], decay: float):
        self._decay = decay
        self._hits, self._tries = [_PRIOR * share for share in known], [_PRIOR] * len(known)

    def note(self, reached: Sequence[float]) -> None:
        """A round in which that share of rows reached depth 0 … d, the deepest of its tree.

        What is known of greater depths is forgotten.
        """
        deepest = len(reached) - 1
        for depth in range(len(self._hits)):
            tried, hit = reached[depth : depth + 2] if depth < deepest else (0.0, 0.0)
            self._hits[depth] = self._hits[depth] * self._decay + hit
            self._tries[depth] = self._tries[depth] * self._decay + tried

    @property
    def values(self) -> list[float]:
        """p1 … pD; where little is known, as that of the depth above."""
        share = self._hits[0] / self._tries[0]
        found = [share]
        for hit, tried in zip(self._hits[1:], self._tries[1:], strict=True):
            share = (hit + share) / (tried + 1.0)
            found.append(share)
        return found


class RoundTimes:
    """What is known of the rounds of one kind of request, from one request to the next.

    Args:
        levels: the trees that rounds grow, by depth.
        warm: so many rounds of each level are not timed.

    Attributes:
        seconds: of a round of each level; where it never ran, as expected from those above it.
        shares: of all texts.
    """

    def __init__(self, levels: Sequence[Policy], warm: int = 1):
        self.levels, self._warm = levels, warm
        self.seconds = [math.inf] * len(levels)
        self.shares = Shares([_UNKNOWN] * levels[-1].max_depth, _SLOW)
        self._timed = [deque[float](maxlen=_WINDOW) for _ in levels]
        self._runs, self._last, self._rounds = [0] * len(levels), [0] * len(levels), 0

    def add(self, level: int, seconds: float) -> None:
        """A round of a level took so long."""
        self._rounds += 1
        self._runs[level] += 1
        if self._runs[level] <= self._warm:
            return
        if self._rounds - self._last[level] > _PAUSE:
            self._timed[level].clear()
        self._last[level] = self._rounds
        self._timed[level].append(seconds)
        self.seconds[level] = median_low(self._timed[level])
        for deeper in range(max(level + 1, 3), len(self.levels)):
            if not self._timed[deeper]:
                self.seconds[deeper] = self._expected(deeper)

    def _expected(self, level: int) -> float:
        """Seconds of a round of a level that never ran, by how much the two above it differ."""
        one, two, own = (self.levels[n].max_depth for n in (level - 2, level - 1, level))
        before, last = self.seconds[level - 2 : level]
        if math.isinf(last):
            return last
        return last + max(last - before, 0.0) * (own - two) / (two - one)

    def untimed(self, first: int) -> int | None:
        """The deepest of the first three levels, from `first` on, that is not timed; or None."""
        for level in reversed(range(first, min(len(self.levels), 3))):
            if self._runs[level] < self._warm + _TIMED:
                return level
        return None

    def stale(self, first: int) -> int | None:
        """A level from `first` on that is to be timed anew: seldom, where that costs much."""
        if self._rounds % _WINDOW:
            return None
        known = [level for level in range(first, len(self.levels)) if self._timed[level]]
        least = min(self.seconds[level] for level in known)
        for level in known:
            cost = self.seconds[level] / least
            if self._rounds - self._last[level] > cost * (len(known) - 1) / _ANEW:
                return level
        return None


class DepthChoice:
    """Chooses the trees of a request's rounds.

    Args:
        times: of such requests.
        plain: whether rounds may draft nothing; else the least is the shallowest tree.
    """

    def __init__(self, times: RoundTimes, plain: bool = True):
        self.times, self._first = times, 0 if plain else 1
        self._numbers = {id(level): n for n, level in enumerate(times.levels)}
        self._shares = Shares(times.shares.values, _DECAY)
        self._plain_rounds = 0  # in a row, up to now
        self._accepted = False  # whether most rows accepted what the last round drafted

    def next(self) -> Policy:
        """The tree of the next round."""
        level = self._next()
        self._plain_rounds = self._plain_rounds + 1 if level == 0 else 0
        return self.times.levels[level]

    def _next(self) -> int:
        first, times = self._first, self.times
        if (level := times.untimed(first)) is not None or (level := times.stale(first)) is not None:
            return level
        seconds = times.seconds
        waited = self._plain_rounds * _TRIED > seconds[1] / seconds[0] - 1.0
        if self._accepted or waited or self._plain_rounds >= PLAIN_ROUNDS:
            first = 1
        tokens = self._expected()
        rates = [tokens[n.max_depth] / s for n, s in zip(times.levels, seconds, strict=True)]
        return max(range(first, len(rates)), key=rates.__getitem__)

    def _expected(self) -> list[float]:
        """Tokens that a row is expected to emit in a round of depth 0 … D."""
        reached, found = 1.0, [1.0]
        for share in self._shares.values:
            reached *= share
            found.append(found[-1] + reached)
        return found

    def note(self, tree: Policy, nodes: np.ndarray, going: np.ndarray, seconds: float) -> None:
        """A round with a tree took so long, and accepted paths of `nodes` [B], root counted.

        Args:
            going: [B] bool, the rows that were part of it.
        """
        level = self._numbers[id(tree)]
        self.times.add(level, seconds)
        self._accepted = False
        if not level or not going.any():
            return
        ends = np.bincount(nodes[going] - 1, minlength=tree.max_depth + 1)  # paths of each depth
        reached = (ends[::-1].cumsum()[::-1] / ends.sum()).tolist()
        self._accepted = reached[1] > 0.5
        for shares in (self._shares, self.times.shares):
            shares.note(reached)
