"""What the rounds of a request did: one report each, and what they add up to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Emitted:
    """One round's report, on the host.

    Attributes:
        count: [B] how many of each row's tokens are new.
        nodes: [B] nodes on the accepted path before any cut, the root counted.
        tokens: [B, A] the tokens, the new ones first.
    """

    count: np.ndarray
    nodes: np.ndarray
    tokens: np.ndarray


class Stats:
    """What the rounds of a request did. A row-round is one round of one unfinished row.

    Args:
        depth: D of the trees.

    Attributes:
        prefill_seconds: until the first token was there.
        decode_seconds: from the first token to the last; what a streamer did with them counts too.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.prefill_seconds = self.decode_seconds = 0.0
        self._rounds: list[Emitted] = []

    def add(self, emitted: Emitted) -> None:
        """Note one round."""
        self._rounds.append(emitted)

    def extend(self, other: Stats) -> None:
        """Note another request's rounds too."""
        self._rounds += other._rounds

    @property
    def counts(self) -> np.ndarray:
        """[rounds, B] tokens that each round emitted in each row; 0 in rows that had ended."""
        return np.array([emitted.count for emitted in self._rounds], dtype=int)

    @property
    def tokens(self) -> int:
        """Tokens emitted in rounds; the first token of a row, which the prefill gives, is not."""
        return sum(int(emitted.count.sum()) for emitted in self._rounds)

    @property
    def rounds(self) -> int:
        """Active row-rounds."""
        return sum(int((emitted.count > 0).sum()) for emitted in self._rounds)

    @property
    def tau(self) -> float:
        """Tokens per round; NaN before the first round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance at depth 1 … D, given that the parent was accepted; NaN where none was."""
        reached = np.zeros(self.depth + 1)
        for emitted in self._rounds:
            nodes = emitted.nodes[emitted.count > 0, None]
            reached += (nodes > np.arange(self.depth + 1)).sum(0)
        return [float(b / a) if a else float("nan") for a, b in itertools.pairwise(reached)]
