"""The figures of a text that is being written: tokens per second, τ, acceptance by depth."""

from __future__ import annotations

import time

import numpy as np
from rich.text import Text

from headstart.infer import Emitted

from .drafted_text import colour


def rate(speed: float) -> str:
    """Tokens a second, in words.

    >>> rate(4.44), rate(1234.5)
    ('4.4 tokens/s', '1,234 tokens/s')
    """
    return f"{speed:,.0f} tokens/s" if speed >= 10 else f"{speed:.1f} tokens/s"


class Figures:
    """Counts what one row's rounds emit.

    Attributes:
        tokens: all of them, the first one counted; drafted: those that were drafted.
        rounds: without the prefill.
    """

    def __init__(self) -> None:
        self.tokens = self.drafted = self.rounds = 0
        self._reached = np.zeros(1, dtype=int)  # rounds whose path reached depth 0, 1, …
        self._first = self._last = 0.0

    def add(self, emitted: Emitted) -> None:
        """Take what the prefill, first, or a round emitted."""
        count, nodes = int(emitted.count[0]), int(emitted.nodes[0])
        self._last = time.perf_counter()
        if not self.tokens:
            self._first = self._last
        else:
            self.rounds += 1
            if (missing := emitted.tokens.shape[1] - len(self._reached)) > 0:
                self._reached = np.pad(self._reached, (0, missing))
            self._reached += np.arange(len(self._reached)) < nodes
        self.tokens += count
        self.drafted += int((emitted.depths[0, :count] > 0).sum())

    @property
    def tau(self) -> float | None:
        """Tokens per round; None before the first."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._last - self._first

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first; None before there is another."""
        return (self.tokens - 1) / self.seconds if self.seconds > 0 else None

    @property
    def acceptance(self) -> list[float]:
        """At depth 1, 2, …: how often a node was accepted where its parent was."""
        above, below = self._reached[:-1], self._reached[1:]
        return [b / a for a, b in zip(above.tolist(), below.tolist(), strict=True) if a]

    def line(self) -> str:
        """In words, on one line."""
        parts = [f"{self.tokens} token{'s' if self.tokens != 1 else ''}"]
        if (speed := self.speed) is not None:
            parts.append(rate(speed))
        if self.tau is not None:
            parts.append(f"τ {self.tau:.2f}")
        if len(self._reached) > 1:
            parts.append(f"{self.drafted / self.tokens:.0%} drafted")
        return " · ".join(parts)

    def legend(self, width: int, colours: bool) -> Text:
        """Acceptance by depth, each depth in its colour, as far as `width` columns hold it.

        What a plain token means is left out first.
        """
        shares = self.acceptance
        if not self.rounds:
            return Text("no round yet", "dim")
        if not any(shares):
            return Text("nothing drafted was accepted" if shares else "no drafter", "dim")
        end = " · plain: the target's own" if colours else " · underlined: drafted"
        found = Text("accepted at depth", "dim")
        parts = [f"{depth}: {share:.0%}" for depth, share in enumerate(shares, start=1)]
        if found.cell_len + len(" " + "  ".join(parts) + end) > width:
            end = ""
        for depth, part in enumerate(parts, start=1):
            gap = " " if depth == 1 else "  "
            more = len(" …") if depth < len(parts) else 0
            if found.cell_len + len(gap + part + end) + more > width:
                return found.append(" …", "dim")
            found.append(gap)
            found.append(part, colour(depth) if colours else "")
        return found.append(end, "dim")
