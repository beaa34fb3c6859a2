"""Retrieval: what followed in texts of the target where they read like the last tokens.

No weights and no training steps (REST, He et al. 2024, arXiv 2311.08252; the tree of earlier
answers of suffix decoding, Oliaro et al. 2024, arXiv 2411.04975): a drafter is what the target
wrote, each part after the P tokens before it. These texts are kept one after another, and beside
them, in the order of their contexts, the places before each token that was written. A context is
what leads up to a place, read backwards, so that contexts that end alike stand side by side:

    place  0 1 2 3 4 5 6 7 8 9 10         in order   context         next token
    text   - a b c - a b d - b d              9      b -             d
                                              2      b a -           c
                                              6      b a - c b a -   d

A request's last tokens are searched for among them, and the M places with the longest matches are
followed. Each votes for the token that comes next, and counts twice as much for every further token
of its match. After `… x a b` places 2 and 6 match two tokens and place 9 one: d has three fifths of
the votes, c two.
"""

import logging
from collections.abc import Iterable, Iterator

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel

from .declared.retrieval import RetrievalFields
from .drafter import DrafterConfig, Step
from .parts.matches import MatchDrafter, MatchState, first_ones, same_tokens

logger = logging.getLogger(__name__)

_BRANCHES = 64  # into which a step of the search divides what is left
_END, _BEFORE = -1, -2  # between two texts, and before a request's first token


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


class Retrieval(MatchDrafter):
    """Proposes candidates with their probabilities, by the votes of the matches."""

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
        self.register_buffer("text", torch.full((size,), _END, dtype=torch.int32))
        self.register_buffer("order", torch.full((places,), config.max_match, dtype=torch.int32))
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """That of its votes; transformers' own asks for weights."""
        return torch.float32

    @property
    def default_tree(self) -> str:
        return "best-first:16,4,8"

    def collect(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        config, device = self.config, self.text.device
        first = config.max_match + 1
        kept, places, size = [torch.full((first,), _END)], [], first
        for start, tokens in _written(texts, config.max_match):
            if size + len(tokens) + 1 - first > config.max_tokens:
                logger.warning(
                    f"drafter.max_tokens is {config.max_tokens}: of the texts, those after the "
                    f"first {size - first} tokens are left out."
                )
                break
            kept += [tokens, torch.tensor([_END])]
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
        state.recent = tokens.new_full((len(tokens), self.config.max_match), _BEFORE)
        self._append(state, tokens, count)

    def begin(self, state: RetrievalState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self._append(state, tokens, count)
        newest = state.recent.flip(1)  # [B, P], as contexts are compared
        most, places = self.config.matches, len(self.order)
        offset = torch.arange(-most, most, device=tokens.device)
        near = self._place_of(newest).unsqueeze(1) + offset  # [B, 2M]
        source = self.order[near.clamp(0, places - 1)].long()
        match = (self._contexts(source) == newest.unsqueeze(1)).cumprod(-1).sum(-1)  # [B, 2M]
        match = match.masked_fill((near < 0) | (near >= places), 0)
        nearness = 2 * offset.abs() + (offset < 0)  # no two alike
        best = (match * (4 * most) - nearness).topk(most, -1).indices  # [B, M], longest first
        match, state.source = match.gather(1, best), source.gather(1, best)
        state.weight = torch.exp2((match - match[:, :1]).float())
        return self.at_root(state, match > 0)

    def after(self, state: RetrievalState, depth: Tensor) -> Tensor:
        place = state.source.unsqueeze(1) + depth.unsqueeze(-1) + 1  # [B, W, M]
        return self.text[place.clamp(max=len(self.text) - 1)].long()

    def proposals(self, state: RetrievalState, tokens: Tensor, agrees: Tensor) -> Step:
        agrees = agrees & (tokens != _END)
        votes = state.weight.unsqueeze(1) * agrees  # [B, W, M]
        same = same_tokens(tokens)
        score = (same * votes.unsqueeze(-2)).sum(-1) * first_ones(same, agrees)
        score, best = score.sort(dim=-1, descending=True, stable=True)
        ids = tokens.gather(-1, best).masked_fill(score == 0, -1)
        return Step(ids=ids, log_probs=(score / votes.sum(-1, keepdim=True)).log())

    def _append(self, state: RetrievalState, tokens: Tensor, count: Tensor) -> None:
        joined = torch.cat([state.recent, tokens], 1)
        last = torch.arange(self.config.max_match, device=tokens.device)
        state.recent = joined.gather(1, count.unsqueeze(1) + last)

    def _contexts(self, places: Tensor) -> Tensor:
        """The P tokens up to places [...] of the text, the newest first: [..., P]."""
        back = torch.arange(self.config.max_match, device=places.device)
        return self.text[places.unsqueeze(-1) - back]

    def _place_of(self, newest: Tensor) -> Tensor:
        """How many contexts of the order come before those given: [B, P] -> [B]."""
        places = len(self.order)
        low = newest.new_zeros(len(newest))  # the answer is in [low, low + width)
        width = places + 1
        while width > 1:
            width = -(-width // _BRANCHES)
            at = low.unsqueeze(1) + width * torch.arange(1, _BRANCHES, device=low.device) - 1
            keys = self._contexts(self.order[at.clamp(max=places - 1)].long())  # [B, 63, P]
            given = newest.unsqueeze(1).expand_as(keys)
            # The first token that differs decides; where none does, the first one says no.
            differs = (keys != given).byte().argmax(-1, keepdim=True)
            before = (keys.gather(-1, differs) < given.gather(-1, differs)).squeeze(-1)
            low = low + width * (before & (at < places)).sum(-1)
        return low


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


def in_order(text: Tensor, places: Tensor, length: int) -> Tensor:
    """Places of a text in the order of the `length` tokens up to each, read backwards.

    Ranks of contexts are doubled in length until they suffice (Manber and Myers 1990), so that the
    work grows with the text's length times the logarithm of `length`.

    Args:
        text: [N] int64, at least -1.
        places: [M] int64.

    >>> in_order(torch.tensor([-1, 1, 2, -1, 1, 2, 3, 2]), torch.tensor([2, 5, 6, 7]), 2).tolist()
    [2, 5, 7, 6]
    """
    rank, known = torch.unique(text, return_inverse=True)[1], 1
    while known < length:
        before = torch.cat([rank.new_zeros(known), rank[:-known] + 1])
        rank = torch.unique(rank * (len(text) + 1) + before, return_inverse=True)[1]
        known *= 2
    return places[rank[places].argsort(stable=True)]
