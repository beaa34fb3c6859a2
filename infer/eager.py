"""Runs rounds as they are written, and reads each one's report before the next one starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from .report import ProposalCheck
from .request import Request
from .round import run_round


class EagerRunner:
    """Runs the rounds of one request, one after another.

    Attributes:
        slots_ahead: slots written by rounds that start before the last one was read; none here.
    """

    slots_ahead = 0

    def __init__(self, request: Request):
        self.request, self._rounds = request, 0

    def start(self, batch: int, capacity: int) -> list[Any]:
        """The drafters' states for prompts that are about to be run, of at most so many slots."""
        return self.request.drafters.start(batch, capacity)

    def begin(self) -> None:
        """Take over after the prefill."""

    def next_report(self) -> tuple[np.ndarray, int]:
        """Run a round and read its report; and A, the tokens of each row in it."""
        request, longest = self.request, self.request.rows.longest
        request.make_space(longest)
        check = None
        if request.drafters.members and (self._rounds < 16 or self._rounds % 8 == 0):
            check = ProposalCheck(request.drafters)
        self._rounds += 1
        request.drafters.reserve(request.states, longest, request.capacity.behind)
        request.committed, packed = run_round(request, longest, request.rows.even, check)
        return packed.cpu().numpy(), request.committed.tokens.shape[1]

    def restore_ended_rows(self, count: np.ndarray) -> None:
        """See `Request.restore_ended_rows`; count [B]: what the last round emitted."""
        self.request.restore_ended_rows(count)
