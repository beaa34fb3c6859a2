"""Drafters that peek at the text to come: always, never or sometimes right, in three shapes.

`Heads` answers for every depth at once (Medusa's shape), `Cached` keeps what it was given and grows
level by level (EAGLE's), `Lookup` returns candidates with gaps (prompt lookup's). `Cached` also
checks the loop: what it holds must be each row's true text and the target's true features.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import FINAL, Drafter, DrafterConfig, DrafterGroup, Sampling, Step
from headstart.heads.core import capture
from headstart.infer import Decoding, Request, Target, parse_tree
from headstart.infer.trees.policy import Committed
from tests.support.tiny import VOCAB

WIDTH = 4  # ranked tokens per proposal


@dataclass
class Script:
    """What a drafter peeks at.

    Attributes:
        tokens: [B, L] each row's continuation, from its first new token on.
        mode: `always` puts the right token first, `never` leaves it out, `sometimes` puts it at
            rank 0, 1 or 2 or leaves it out, depending on the token and its place.
    """

    tokens: Tensor
    mode: str = "sometimes"

    def right(self, place: Tensor) -> Tensor:
        """The token at each place [B, W] of the continuation."""
        return self.tokens.gather(1, place.clamp(0, self.tokens.shape[1] - 1))

    def rank(self, place: Tensor) -> Tensor:
        """Where the right token stands among the candidates, WIDTH when it is missing."""
        if self.mode != "sometimes":
            return torch.full_like(place, 0 if self.mode == "always" else WIDTH)
        draw = (self.right(place) * 5 + place * 17 + (place * place) % 11) % 7
        return torch.tensor([0, 0, 1, 0, 2, WIDTH, 1])[draw]

    def candidates(self, place: Tensor) -> Tensor:
        """Distinct tokens [B, W, WIDTH], best first."""
        right = self.right(place).unsqueeze(-1)
        ranks = torch.arange(WIDTH)
        wrong = (right + 1 + ranks) % VOCAB
        return torch.where(ranks == self.rank(place).unsqueeze(-1), right, wrong)


def as_logits(ids: Tensor, scale: float) -> Tensor:
    """Logits [B, W, V] that rank `ids` [B, W, WIDTH] first, `scale` apart."""
    values = (WIDTH - torch.arange(WIDTH, dtype=torch.float64)) * scale
    return torch.zeros(*ids.shape[:2], VOCAB, dtype=torch.float64).scatter(
        -1, ids, values.expand(ids.shape)
    )


class ScriptedConfig(DrafterConfig):
    model_type = "headstart_scripted"


class Scripted(Drafter):
    """Counts what has been emitted; the families below propose."""

    config_class = ScriptedConfig
    layers: tuple[int, ...] = (FINAL,)

    def __init__(self, target: PreTrainedModel, script: Script, scale: float = 1.0):
        config = ScriptedConfig.for_target(target)
        config.feature_layers = self.layers
        super().__init__(config)
        self.script, self.scale = script, scale
        self.bind(target)

    def start(self, batch: int, capacity: int) -> Any:
        return SimpleNamespace(emitted=torch.zeros(batch, 1, dtype=torch.long), capacity=capacity)

    def take(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        """The shapes of the contract hold, and what was emitted is counted."""
        width = self.config.hidden_size * len(self.layers)
        assert features.shape == (*tokens.shape, width)
        assert count.shape == tokens.shape[:1]
        state.emitted = state.emitted + count.unsqueeze(1)

    def embed(self, tokens: Tensor) -> None:
        """Look the tokens up, as a drafter with weights does; an id below 0 raises."""
        self.target.get_input_embeddings()(tokens)


class Heads(Scripted):
    """Independent heads for four depths."""

    independent = True

    @property
    def max_depth(self) -> int:
        return 4

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.take(state, features, tokens, count)
        ids = self.script.candidates(state.emitted + torch.arange(self.max_depth))
        return Step(as_logits(ids, self.scale))

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        raise AssertionError("extend is never called on independent heads")


class Cached(Scripted):
    """Keeps (feature, token) pairs per row, and proposes from the chain of each node's parents.

    Off the scripted text a node's proposals depend on its own token, so a wrong parent shows.
    """

    layers = (1, FINAL)

    def __init__(
        self,
        target: PreTrainedModel,
        script: Script,
        scale: float = 1.0,
        prompts: list[list[int]] | None = None,
    ):
        super().__init__(target, script, scale)
        self.prompts, self.checks = prompts, 0

    def start(self, batch: int, capacity: int) -> Any:
        state = super().start(batch, capacity)
        width = self.config.hidden_size * len(self.layers)
        # The last slot takes what is not to be kept.
        state.features = torch.zeros(batch, capacity + 1, width, dtype=torch.float64)
        state.tokens = torch.zeros(batch, capacity + 1, dtype=torch.long)
        state.size = torch.zeros(batch, 1, dtype=torch.long)
        return state

    def append(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        step = torch.arange(tokens.shape[1])
        slot = torch.where(step < count.unsqueeze(1), state.size + step, state.capacity)
        state.tokens.scatter_(1, slot, tokens)
        state.features.scatter_(1, slot.unsqueeze(-1).expand(features.shape), features)
        state.size = state.size + count.unsqueeze(1)

    def prefill(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        if self.prompts is not None:
            assert [row[:n].tolist() for row, n in zip(tokens, count, strict=True)] == self.prompts
        self.append(state, features[:, :-1], tokens[:, 1:], count - 1)

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.take(state, features, tokens, count)
        self.append(state, features, tokens, count)
        if self.prompts is not None:
            self.check(state)
        ids = self.script.candidates(state.emitted)
        state.proposed, state.grown = ids, 0
        state.depth = torch.zeros(len(ids), 1, dtype=torch.long)  # the root's first
        state.scripted = torch.ones(len(ids), 1, dtype=torch.bool)
        return Step(as_logits(ids, self.scale))

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        assert tokens.shape == parent.shape
        self.embed(tokens)
        at = parent + 1  # entry 0 is the root
        depth = state.depth.gather(1, at) + 1
        expected = self.script.right(state.emitted + depth - 1)
        scripted = state.scripted.gather(1, at) & (tokens == expected)
        if self.prompts is not None:
            offered = state.proposed.gather(1, at.unsqueeze(-1).expand(-1, -1, WIDTH))
            assert (offered == tokens.unsqueeze(-1)).any(-1).all(), "not a child of that parent"
            assert (parent < 0).all() if not state.grown else (parent >= 0).all()
        off = (tokens.unsqueeze(-1) * 3 + depth.unsqueeze(-1) + torch.arange(WIDTH)) % VOCAB
        ids = torch.where(
            scripted.unsqueeze(-1), self.script.candidates(state.emitted + depth), off
        )
        state.proposed = torch.cat([state.proposed, ids], 1)
        state.depth = torch.cat([state.depth, depth], 1)
        state.scripted = torch.cat([state.scripted, scripted], 1)
        state.grown += 1
        return Step(as_logits(ids, self.scale))

    def check(self, state: Any) -> None:
        """The cache holds each row's text so far and the features of exactly those positions."""
        assert self.prompts is not None
        for row, prompt in enumerate(self.prompts):
            emitted, size = state.emitted[row].item(), state.size[row].item()
            text = torch.tensor([prompt + self.script.tokens[row, :emitted].tolist()])
            assert size == text.shape[1] - 1 <= state.capacity
            assert torch.equal(state.tokens[row, :size], text[0, 1:])
            features = capture(self.target, self.layers, text[:, :-1])
            assert (features[0] - state.features[row, :size]).abs().max() <= 1e-10
        self.checks += 1


class Lookup(Scripted):
    """Candidates, level by level; -1 where nothing is found, everywhere at some places."""

    def found(self, ids: Tensor, place: Tensor) -> Step:
        ranks = torch.arange(WIDTH)
        kept = ranks < 1 + (place * 7).unsqueeze(-1) % WIDTH
        if self.script.mode != "always":
            kept = kept & (place % 5 != 3).unsqueeze(-1)
        return Step(ids=ids.masked_fill(~kept, -1))

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.take(state, features, tokens, count)
        state.depths = torch.zeros(len(tokens), 1, dtype=torch.long)
        return self.found(self.script.candidates(state.emitted), state.emitted)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        self.embed(tokens)
        depth = state.depths.gather(1, parent + 1) + 1
        state.depths = torch.cat([state.depths, depth], 1)
        place = state.emitted + depth
        return self.found(self.script.candidates(place), place)


SHAPES: dict[str, type[Scripted]] = {"heads": Heads, "cached": Cached, "lookup": Lookup}


def make(
    shape: str,
    target: PreTrainedModel,
    tokens: Tensor,
    mode: str = "sometimes",
    scale: float = 1.0,
    prompts: list[list[int]] | None = None,
) -> Scripted:
    """A scripted drafter; with `prompts`, a `Cached` one checks the loop as it goes."""
    script = Script(tokens, mode)
    if shape == "cached":
        return Cached(target, script, scale, prompts)
    return SHAPES[shape](target, script, scale)


def decoding_of(
    target: PreTrainedModel,
    drafter: Drafter | DrafterGroup | None,
    tree: Any,
    sampling: Sampling | None = None,
    **options: Any,
) -> Decoding:
    """The loop without `generate` around it, to be driven round by round."""
    group = DrafterGroup.of(drafter)
    group.bind(target)
    runner = Target(target, group.feature_layers)
    request = Request(runner, group, parse_tree(tree), sampling or Sampling(), **options)
    return Decoding(request)


def rows_of(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Left-padded prompts as lists without their padding."""
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def committed(batch: int) -> Committed:
    tokens = torch.randint(VOCAB, (batch, 3))
    count = torch.tensor([3, 1, 2][:batch])
    tokens = tokens.gather(1, torch.arange(3).minimum(count.unsqueeze(1) - 1))
    return Committed(torch.zeros(batch, 3, 0), tokens, count, torch.tensor([7, 4, 9][:batch]))
