"""How deep the next tree is, where that follows what is accepted and what rounds take.

A round of depth d is expected to emit 1 + p1 + p1·p2 + … + p1·…·pd tokens of a row, where pk is the
share of rounds that accept a node of depth k after its parent. The depth is taken whose rounds
emit most per second. Shares are of each row, and recent rounds count more; seconds are measured as
rounds run, so they hold for this machine, batch and length of text. The text depends on neither:
only rules take part under which it is that of plain decoding.

The same idea is in Liu et al. 2024 (arXiv 2406.14066), which calls tokens per second goodput.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from .trees.policy import Policy

_DECAY = 0.95  # of what a round counts for, from one round to the next
_PRIOR = 5.0  # rounds that the shares of earlier texts count for
_SLOW = 0.99  # of what a round counts for in them
_UNKNOWN = 0.7  # those shares before any text

_TIMED = 2  # rounds of a depth that are timed before its time is believed
_WINDOW = 9  # the last times of a depth count; those before a pause of so many rounds do not:
_PAUSE = 64
_ANEW = 0.02  # of the time is spent on measuring the other depths anew
_TRIED = 0.03  # of the time of plain rounds is spent on drafting, to see whether it pays again

PLAIN_ROUNDS = 32
"""At most so many plain rounds come in a row; after the next one, drafters take in all tokens."""


class RoundTimes:
    """What is known of the rounds of one kind of request, from one request to the next.

    Args:
        levels: the trees that rounds grow, by depth.
        warm: so many rounds of each level are not timed.

    Attributes:
        seconds: of a round of each level; where it never ran, as expected from those above it.
    """

    def __init__(self, levels: Sequence[Policy], warm: int = 1):
        self.levels, self._warm = levels, warm
        self._tries = np.full(levels[-1].max_depth, _PRIOR)  # [D]
        self._hits = _UNKNOWN * self._tries
        self._timed = [deque[float](maxlen=_WINDOW) for _ in levels]
        self.seconds = [math.inf] * len(levels)
        self._runs, self._last, self._rounds = [0] * len(levels), [0] * len(levels), 0

    @property
    def accepted(self) -> np.ndarray:
        """[D] the share of rounds that accept a node of depth 1 … D after its parent."""
        return self._hits / self._tries

    def note(self, tried: np.ndarray, hit: np.ndarray) -> None:
        """Which nodes of depth 1 … d [B, d] had an accepted parent, and which were accepted."""
        depths, found = tried.shape[1], tried.sum(0)
        kept = _SLOW**found
        self._hits[:depths] = self._hits[:depths] * kept + (tried & hit).sum(0)
        self._tries[:depths] = self._tries[:depths] * kept + found

    def add(self, level: int, seconds: float) -> None:
        """A round of a level took so long."""
        self._rounds += 1
        self._runs[level] += 1
        if self._runs[level] > self._warm:
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
        self.times, self._first, self._plain_rounds = times, 0 if plain else 1, 0
        self._numbers = {id(level): n for n, level in enumerate(times.levels)}
        self._depths = np.array([level.max_depth for level in times.levels])
        self._hits, self._tries = np.zeros((2, 0, 0))  # [B, D]
        self._accepted = False  # whether most rows accepted what the last round drafted
        self._tokens: dict[bytes, list[float]] = {}  # by the rows that go on, see `_expected`

    def begin(self, rows: Sequence[int], batch: int) -> None:
        """These rows, of so many, begin a text."""
        accepted, where = self.times.accepted, list(rows)
        if len(self._hits) != batch:
            self._hits, self._tries = np.zeros((2, batch, len(accepted)))
        self._hits[where], self._tries[where] = _PRIOR * accepted, _PRIOR
        self._tokens.clear()

    def next(self, going: np.ndarray) -> Policy:
        """The tree of the next round, of which these rows [B] bool are part."""
        level = self._next(going)
        self._plain_rounds = self._plain_rounds + 1 if level == 0 else 0
        return self.times.levels[level]

    def _next(self, going: np.ndarray) -> int:
        first, times = self._first, self.times
        if (level := times.untimed(first)) is not None or (level := times.stale(first)) is not None:
            return level
        seconds = times.seconds
        tokens = self._tokens.get(key := going.tobytes())
        if tokens is None:
            tokens = self._tokens[key] = self._expected(going)[self._depths].tolist()
        waited = self._plain_rounds * _TRIED > seconds[1] / seconds[0] - 1.0
        if self._accepted or waited or self._plain_rounds >= PLAIN_ROUNDS:
            first = 1
        return max(range(first, len(tokens)), key=lambda level: tokens[level] / seconds[level])

    def _expected(self, going: np.ndarray) -> np.ndarray:
        """[D + 1] tokens that a round of depth 0 … D is expected to emit."""
        hits, tries = self._hits[going].T, self._tries[going].T  # [D, rows]
        share = hits[0] / tries[0]
        reached, found = share, [float(len(share)), share.sum()]
        for hit, tried in zip(hits[1:], tries[1:], strict=True):
            share = (hit + share) / (tried + 1.0)  # where little is known, as of the depth above
            reached = reached * share
            found.append(reached.sum())
        return np.cumsum(found)

    def note(self, tree: Policy, nodes: np.ndarray, going: np.ndarray, seconds: float) -> None:
        """A round with a tree took so long, and accepted paths of `nodes` [B], root counted."""
        level = self._numbers[id(tree)]
        self.times.add(level, seconds)
        self._accepted = False
        if not level:
            return
        self._tokens.clear()
        depth = np.arange(1, tree.max_depth + 1)
        tried = (nodes[:, None] >= depth) & going[:, None]  # [B, D of the tree]
        hit = nodes[:, None] > depth
        self._accepted = bool(2 * (hit & tried)[:, 0].sum() > going.sum())
        hits, tries = self._hits[:, : len(depth)], self._tries[:, : len(depth)]
        hits[tried] = hits[tried] * _DECAY + hit[tried]
        tries[tried] = tries[tried] * _DECAY + 1.0
        # What is known of greater depths is forgotten.
        self._hits[:, len(depth) :] *= _DECAY
        self._tries[:, len(depth) :] *= _DECAY
        self.times.note(tried, hit)
