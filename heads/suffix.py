"""Suffix decoding: what followed the text's last tokens before, in it and in earlier answers.

No weights and no training (Oliaro et al. 2024, arXiv 2411.04975): the target's answers to earlier
requests are kept, the oldest until their room is needed, and so is the text of the request itself.
What followed in either where it reads like the last tokens is proposed:

    earlier answers   x a b c     y a b d     z a b d
    request           y a b

The M longest matches in each are followed. Each votes for the token that comes next, and counts
twice as much for every further token of its match: `y a b` has 8 votes for d, and `a b` 4 for d and
4 for c, so that d has three quarters of them. A request whose answer is like earlier ones, as those
of agents are, is answered in few rounds; of the first one its own text is all that is known.
"""

import threading
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from .core.sent import sent
from .declared.suffix import SuffixFields
from .drafter import DrafterConfig, Step
from .parts.contexts import BEFORE, END, Contexts, in_order
from .parts.matches import VotingDrafter
from .parts.request_text import RequestTextDrafter, RequestTextState
from .parts.weightless import WeightlessDrafter

_AT_ONCE = 128  # contexts that are searched for at once, which bounds the memory for it

_writing = threading.Lock()


@strict
class SuffixConfig(SuffixFields, DrafterConfig):
    """See `SuffixFields`."""

    model_type = "headstart_suffix"


class SuffixState(RequestTextState):
    """The rows' text, and the matches of this round in it and in earlier answers."""

    scratch = ("place", "weight", *RequestTextState.scratch)

    place: Tensor  # [B, M] where matches end in the answers that are kept
    weight: Tensor  # [B, 2M] float32, of the matches in the row's own text, then of those


class Suffix(RequestTextDrafter, VotingDrafter, WeightlessDrafter):  # type: ignore[misc]
    """Follows matches in the text so far, and in earlier answers."""

    config_class = SuffixConfig
    config: SuffixConfig
    remembers = True

    answers: Tensor
    """[N] int32: each answer after P times -1 and the P tokens before it, and -1 after it. Contexts
    thus have nothing of other answers, and stay as they are when those are overwritten."""
    order: Tensor
    """[N] int32, the places before the tokens of answers, in the order of their contexts."""
    count: Tensor
    """[1] int64, how many of these there are."""

    def __init__(self, config: SuffixConfig):
        super().__init__(config)
        size = (config.max_tokens,)
        empty = {
            "answers": torch.full(size, END, dtype=torch.int32),
            "order": torch.full(size, config.max_match, dtype=torch.int32),
            "count": torch.zeros(1, dtype=torch.int64),
        }
        for name, value in empty.items():
            self.register_buffer(name, value, persistent=False)
        self._next = 0  # where the next answer is written

    def start(self, batch: int, capacity: int) -> SuffixState:
        return SuffixState()

    def begin(self, state: SuffixState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.append(state, tokens, count)
        most = self.config.matches
        own = self.find_matches(state, 1, most)  # [B, M], fewer in a short text
        newest = state.last.masked_fill(state.last < 0, BEFORE).flip(1)
        match, state.place = self._contexts.nearest(newest, most)
        return self.votes_at_root(state, torch.cat([own, match], 1))

    def after(self, state: Any, depth: Tensor) -> Tensor:
        earlier = self._contexts.following(state.place, depth)
        return torch.cat([super().after(state, depth), earlier], -1)

    @torch.no_grad()
    def remember(self, tokens: Tensor, prompt: int) -> None:
        """See `Drafter.remember`; nothing waits for the device."""
        length, size = self.config.max_match, len(self.answers)
        before = min(prompt, length)
        kept = tokens[prompt - before :].cpu()
        if (longer := len(kept) + length + 1 - size) > 0:
            kept, before = kept[longer:], max(before - longer, 0)
        text = torch.cat([kept.new_full((length,), END), kept, kept.new_full((1,), END)])
        places = torch.arange(max(before, 1), len(kept)) + (length - 1)
        places = in_order(text, places, length)
        with _writing:
            start = 0 if self._next + len(text) > size else self._next
            self._next = start + len(text)
            both = sent(torch.cat([text, places]), self.order.device)
            self._insert(both[: len(text)].int(), both[len(text) :], start)

    def forget(self) -> None:
        self.count.zero_()

    def _insert(self, text: Tensor, places: Tensor, start: int) -> None:
        """Write a text from a place on, and put places of it, in order, between those kept."""
        kept, size = self._contexts, len(self.order)
        contexts = kept._replace(text=text).at(places)  # [n, P]
        rank = torch.cat([kept.rank(some) for some in contexts.split(_AT_ONCE)])
        # Contexts of places just behind the text reach into what it overwrites.
        lost = (self.order >= start) & (self.order < start + len(text) + kept.length)
        number = torch.arange(size, device=places.device)
        stays = (number < self.count) & ~lost
        ahead = torch.nn.functional.pad(stays.cumsum(0), (1, 0))  # that stay, before each rank
        new = torch.zeros_like(ahead).index_add(0, rank, torch.ones_like(rank)).cumsum(0)
        order = self.order.new_full((size + 1,), kept.length)
        order.scatter_(0, torch.where(stays, (ahead + new)[:-1], size), self.order)
        where = ahead[rank] + torch.arange(len(places), device=places.device)
        order.scatter_(0, where, (places + start).int())
        self.answers[start : start + len(text)] = text
        self.order.copy_(order[:-1])
        self.count.copy_(ahead[-1] + len(places))

    @property
    def _contexts(self) -> Contexts:
        return Contexts(self.answers, self.order, self.count, self.config.max_match)
