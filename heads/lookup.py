"""Prompt lookup: what followed the longest earlier occurrence of the text's last tokens.

No weights and no training (Saxena 2023, "prompt lookup decoding"; Yang et al. 2023, arXiv
2304.04487; suffix decoding, Oliaro et al. 2024, arXiv 2411.04975, ranks by suffix match as well).
With the text `a b c a b`, the suffix `a b` occurred before, ending at position 1, so `c` is
proposed, then `a`, then `b`; a continuation that reaches the end of the text repeats:

    position   0 1 2 3 4          the match ends at e = 1, the text at n - 1 = 4, so the period is 3
    token      a b c a b          token j of the continuation is text[e + 1 + j mod 3]: c a b c …
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from .core import in_steps
from .declared.lookup import LookupFields
from .drafter import DrafterConfig, Step
from .parts.matches import MatchDrafter, MatchState, first_ones, same_tokens
from .parts.weightless import WeightlessDrafter


@strict
class LookupConfig(LookupFields, DrafterConfig):
    """See `LookupFields`."""

    model_type = "headstart_lookup"


class LookupState(MatchState):
    """The rows' text and this round's matches."""

    scratch = ("source", "period", *MatchState.scratch)

    longest: int = 0  # a bound on any row's tokens, the root's included, on the host
    text: Tensor  # [B, P + S + 1] int64: P = max_match columns of -1, S slots, and one for padding
    size: Tensor  # [B, 1] tokens of each row
    source: Tensor  # [B, M] where each match ends
    period: Tensor  # [B, M] how far before the text's end that is


class Lookup(MatchDrafter, WeightlessDrafter):
    """Proposes candidates, best first: the continuations of the matches that agree with a node."""

    config_class = LookupConfig
    config: LookupConfig

    def start(self, batch: int, capacity: int) -> LookupState:
        return LookupState()

    def reserve(self, state: LookupState, longest: int, room: int) -> None:
        state.longest = longest + 1
        slots = self._slots(state)
        if state.longest + room > slots or slots != in_steps(slots):
            more = in_steps(max(state.longest + room, slots + slots // 2)) - slots
            state.text = torch.nn.functional.pad(state.text, (0, more), value=-1)

    def prefill(self, state: LookupState, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        state.text = torch.nn.functional.pad(tokens, (self.config.max_match, 1), value=-1)
        state.size = count.unsqueeze(1)

    def begin(self, state: LookupState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self._append(state, tokens, count)
        length, ends = self._match(state)  # [B, S]
        # Longest first, and the latest of equals.
        score = torch.where(length >= self.config.min_match, length * len(ends) + ends, -1)
        best, state.source = score.topk(min(self.config.matches, len(ends)), -1)  # [B, M]
        state.period = (state.size - 1 - state.source).clamp(min=1)
        return self.at_root(state, best >= 0)

    def after(self, state: LookupState, depth: Tensor) -> Tensor:
        onward = depth.unsqueeze(-1) % state.period.unsqueeze(1)
        column = state.source.unsqueeze(1) + onward + (1 + self.config.max_match)  # [B, W, M]
        return state.text.gather(1, column.flatten(1)).view_as(column)

    def proposals(self, state: LookupState, tokens: Tensor, agrees: Tensor) -> Step:
        return Step(ids=_ranked(tokens, agrees))

    def _append(self, state: LookupState, tokens: Tensor, count: Tensor) -> None:
        step = torch.arange(tokens.shape[1], device=tokens.device)
        slot = torch.where(step < count.unsqueeze(1), state.size + step, self._slots(state))
        state.text.scatter_(1, slot + self.config.max_match, tokens)
        state.size = state.size + count.unsqueeze(1)

    def _slots(self, state: LookupState) -> int:
        """S, the tokens of a row that there is room for."""
        return state.text.shape[1] - self.config.max_match - 1

    def _match(self, state: LookupState) -> tuple[Tensor, Tensor]:
        """How many tokens before and at each position equal the text's last ones.

        Returns:
            [B, S], 0 at the text's end itself and after it; and the positions [S].
        """
        before = self.config.max_match
        searched = in_steps(state.longest)  # so shapes seldom change
        ends = torch.arange(searched, device=state.text.device)
        back = torch.arange(before, 0, -1, device=state.text.device)  # the suffix, in order
        suffix = state.text.gather(1, state.size + before - back)  # [B, P]
        # Window e holds the P tokens that end at position e. The -1 before the text equals a -1 of
        # the suffix only where e is the text's end.
        windows = state.text[:, 1 : before + searched].unfold(1, before, 1)  # [B, S, P]
        same = (windows == suffix.unsqueeze(1)).flip(-1)
        return same.cumprod(-1).sum(-1) * (ends < state.size - 1), ends


def _ranked(tokens: Tensor, agrees: Tensor) -> Tensor:
    """The distinct tokens among those that agree, in order: [B, W, M] -> [B, W, M], padded with -1.

    >>> yes = torch.tensor([[[True, False, True, True]]])
    >>> _ranked(torch.tensor([[[7, 5, 7, 6]]]), yes).tolist()
    [[[7, 6, -1, -1]]]
    """
    first = first_ones(same_tokens(tokens), agrees)
    matches = tokens.shape[-1]
    rank = torch.where(first, first.cumsum(-1) - 1, matches)
    ids = tokens.new_full((*tokens.shape[:-1], matches + 1), -1)
    return ids.scatter(-1, rank, tokens)[..., :matches]
