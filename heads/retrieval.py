"""Retrieval: what followed in texts of the target where they read like the last tokens.

No weights and no training steps (REST, He et al. 2024, arXiv 2311.08252): a drafter is what the
target wrote, each part after the P tokens before it. These texts are kept one after another, and
beside them the places before each token that was written, in order, so that those that read like a
request's last tokens are found (`parts/contexts.py`):

    texts     a b c     a b d     b d
    request   x a b

The M places with the longest matches are followed. Each votes for the token that comes next, and
counts twice as much for every further token of its match. After `x a b` the first two texts match
two tokens and the last one matches one: d has three fifths of the votes, c two.
"""

import logging
from collections.abc import Iterable, Iterator

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel

from .declared.retrieval import RetrievalFields
from .drafter import DrafterConfig, Step
from .parts.contexts import BEFORE, END, Contexts, in_order
from .parts.matches import MatchState, VotingDrafter

logger = logging.getLogger(__name__)


@strict
class RetrievalConfig(RetrievalFields, DrafterConfig):
    """See `RetrievalFields`."""

    model_type = "headstart_retrieval"


class RetrievalState(MatchState):
    """The rows' last tokens, and the matches of this round."""

    scratch = ("source", "weight", *MatchState.scratch)

    recent: Tensor  # [B, P], the newest last
    source: Tensor  # [B, M] the places in the text where the matches end
    weight: Tensor  # [B, M] float32


class Retrieval(VotingDrafter):
    """Follows matches in the texts that it is made of."""

    config_class = RetrievalConfig
    config: RetrievalConfig
    collects = RetrievalConfig.collects

    text: Tensor
    """[P + 1 + N] int32: P + 1 times -1, then the texts, with -1 after each."""
    order: Tensor
    """[places] int32, the places before the tokens that the target wrote, in order; see above."""

    def __init__(self, config: RetrievalConfig):
        super().__init__(config)
        size, places = config.max_match + 1 + config.tokens, max(config.places, 1)
        self.register_buffer("text", torch.full((size,), END, dtype=torch.int32))
        self.register_buffer("order", torch.full((places,), config.max_match, dtype=torch.int32))
        self.post_init()

    def collect(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        config, device = self.config, self.text.device
        first = config.max_match + 1
        kept, places, size = [torch.full((first,), END)], [], first
        for start, tokens in _written(texts, config.max_match):
            if size + len(tokens) + 1 - first > config.max_tokens:
                logger.warning(
                    f"drafter.max_tokens is {config.max_tokens}: of the texts, those after the "
                    f"first {size - first} tokens are left out."
                )
                break
            kept += [tokens, torch.tensor([END])]
            places.append(size - 1 + torch.arange(start, len(tokens)))
            size += len(tokens) + 1
        text = torch.cat(kept)
        order = in_order(text, torch.cat(places), config.max_match) if places else text[:0]
        config.tokens, config.places = size - first, len(order)
        if not len(order):
            order = torch.tensor([config.max_match])
        self.text, self.order = text.int().to(device), order.int().to(device)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return []

    def start(self, batch: int, capacity: int) -> RetrievalState:
        return RetrievalState()

    def prefill(
        self, state: RetrievalState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        state.recent = tokens.new_full((len(tokens), self.config.max_match), BEFORE)
        self._append(state, tokens, count)

    def begin(self, state: RetrievalState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self._append(state, tokens, count)
        newest = state.recent.flip(1)  # [B, P], as contexts are compared
        match, state.source = self._contexts.nearest(newest, self.config.matches)
        return self.votes_at_root(state, match)

    def after(self, state: RetrievalState, depth: Tensor) -> Tensor:
        return self._contexts.following(state.source, depth)

    @property
    def _contexts(self) -> Contexts:
        return Contexts(self.text, self.order, len(self.order), self.config.max_match)

    def _append(self, state: RetrievalState, tokens: Tensor, count: Tensor) -> None:
        joined = torch.cat([state.recent, tokens], 1)
        last = torch.arange(self.config.max_match, device=tokens.device)
        state.recent = joined.gather(1, count.unsqueeze(1) + last)


def _written(texts: Iterable[tuple[Tensor, Tensor]], length: int) -> Iterator[tuple[int, Tensor]]:
    """What is kept of texts: each run of tokens that may be proposed, after `length` others.

    Returns:
        Where the run begins in the tokens [n] int64.

    >>> text, chosen = torch.tensor([5, 6, 7, 8, 9, 4, 3]), torch.tensor([0, 0, 1, 1, 0, 0, 1])
    >>> [(start, tokens.tolist()) for start, tokens in _written([(text, chosen.bool())], 1)]
    [(1, [6, 7, 8]), (1, [4, 3])]
    """
    for tokens, chosen in texts:
        edges = torch.nn.functional.pad(chosen.int(), (1, 1)).diff().nonzero().squeeze(1)
        for start, end in edges.view(-1, 2).tolist():
            before = min(start, length)
            yield before, tokens[start - before : end].long().cpu()
