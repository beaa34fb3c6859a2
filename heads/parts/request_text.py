"""The text of each request so far, and where its last tokens stood before."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import in_steps
from .matches import MatchDrafter, MatchState


class RequestTextState(MatchState):
    """The rows' text and this round's matches."""

    scratch = ("last", "source", "period", *MatchState.scratch)

    longest: int = 0  # a bound on any row's tokens, the root's included, on the host
    text: Tensor  # [B, P + S + 1] int64: P = max_match columns of -1, S slots, and one for padding
    size: Tensor  # [B, 1] tokens of each row
    last: Tensor  # [B, P] the last of them, in order; -1 before a shorter text
    source: Tensor  # [B, M] where each match ends
    period: Tensor  # [B, M] how far before the text's end that is


class RequestTextDrafter(MatchDrafter):
    """Follows what stood in the text after earlier occurrences of its last tokens.

    Its config has `max_match`, P, the most tokens that are compared.
    """

    def start(self, batch: int, capacity: int) -> RequestTextState:
        return RequestTextState()

    def reserve(self, state: RequestTextState, longest: int, room: int) -> None:
        state.longest = longest + 1
        slots = self._slots(state)
        if state.longest + room > slots or slots != in_steps(slots):
            more = in_steps(max(state.longest + room, slots + slots // 2)) - slots
            state.text = torch.nn.functional.pad(state.text, (0, more), value=-1)

    def prefill(
        self, state: RequestTextState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        state.text = torch.nn.functional.pad(tokens, (self.config.max_match, 1), value=-1)
        state.size = count.unsqueeze(1)

    def append(self, state: RequestTextState, tokens: Tensor, count: Tensor) -> None:
        """Add what was just committed, see `begin`."""
        before, device = self.config.max_match, tokens.device
        step = torch.arange(tokens.shape[1], device=device)
        slot = torch.where(step < count.unsqueeze(1), state.size + step, self._slots(state))
        state.text.scatter_(1, slot + before, tokens)
        state.size = state.size + count.unsqueeze(1)
        state.last = state.text.gather(1, state.size + torch.arange(before, device=device))

    def find_matches(self, state: RequestTextState, shortest: int, most: int) -> Tensor:
        """Find this round's matches, the longest first, and the latest of equals.

        Args:
            shortest: tokens of a match; most: matches of a row.

        Returns:
            Their lengths [B, M], -1 where there is none.
        """
        length, ends = self._match(state)  # [B, S]
        score = torch.where(length >= shortest, length * len(ends) + ends, -1)
        best, state.source = score.topk(min(most, len(ends)), -1)  # [B, M]
        state.period = (state.size - 1 - state.source).clamp(min=1)
        return best // len(ends)

    def after(self, state: RequestTextState, depth: Tensor) -> Tensor:
        onward = depth.unsqueeze(-1) % state.period.unsqueeze(1)
        column = state.source.unsqueeze(1) + onward + (1 + self.config.max_match)  # [B, L, M]
        return state.text.gather(1, column.flatten(1)).view_as(column)

    def _slots(self, state: RequestTextState) -> int:
        """S, the tokens of a row that there is room for."""
        return state.text.shape[1] - self.config.max_match - 1

    def _match(self, state: RequestTextState) -> tuple[Tensor, Tensor]:
        """How many tokens before and at each position equal the text's last ones.

        Returns:
            [B, S], 0 at the text's end itself and after it; and the positions [S].
        """
        before = self.config.max_match
        searched = in_steps(state.longest)  # so shapes seldom change
        ends = torch.arange(searched, device=state.text.device)
        # Window e holds the P tokens that end at position e. The -1 before the text equals a -1 of
        # the last tokens only where e is the text's end.
        windows = state.text[:, 1 : before + searched].unfold(1, before, 1)  # [B, S, P]
        same = (windows == state.last.unsqueeze(1)).flip(-1)
        return same.cumprod(-1).sum(-1) * (ends < state.size - 1), ends
