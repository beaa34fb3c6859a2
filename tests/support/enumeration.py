"""Every outcome of one round, with its exact probability, through the shipped functions.

A round is a function of uniforms. The unit cube of all the uniforms that it reads is cut into
boxes: a batch row is a box, the row is handed a point inside its box, and every comparison that the
round makes (`accepts` against a probability, `draw` against a distribution's running sum) names
a threshold. A box with a threshold strictly inside is cut there and run again; in the others every
point decides alike, so the box's volume is the probability of its outcome. Uniforms are known by
their key (stream, position, draw), as in the product: a key that is used twice is one coordinate.

Distinct children are the first of the tokens in the order of score + Gumbel noise. Those orders are
enumerated too, with their Plackett-Luce probabilities; that the noise has that law is shown by
sampling, in test_chisquare.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads import Sampling, Step, TokenTree
from headstart.heads.core.noise import Stream
from headstart.heads.group import GroupMember, members, proposer
from headstart.infer.masked_proposals import MaskedProposals
from headstart.infer.rules.registry import RULES, Rule
from headstart.infer.rules.rule_api import Accepted, Text, Verified, seen_in
from headstart.infer.trees.children import Children
from headstart.infer.trees.expansions import Expansion
from headstart.infer.trees.policy import Committed, Policy

ROWS = 1 << 14  # boxes that are run as one batch
EDGE = 1e-15  # thresholds this near to a box's face are the face
ROOT = 0  # the root's token
POSITION = 5  # and its position


class Orders:
    """All ways to take `ranks` of V tokens in order, and what each is worth."""

    def __init__(self, vocab: int, ranks: int):
        ranks = min(ranks, vocab)
        self.tokens = torch.tensor(list(itertools.permutations(range(vocab), ranks)))  # [P, k]
        left = torch.ones(len(self.tokens), ranks, vocab, dtype=torch.bool)
        for rank in range(ranks):
            left[:, rank + 1 :].scatter_(
                2, self.tokens[:, rank].view(-1, 1, 1).expand(-1, ranks - rank - 1, 1), False
            )
        self.left = left.double()  # [P, k, V] what can still be taken at each rank
        # Once nothing is left to draw, one order stands for all of them.
        self.tail = left.byte().argmax(-1) == self.tokens  # [P, k]

    def weights(self, scores: Tensor) -> Tensor:
        """Plackett-Luce probabilities [B, P] of the orders under softmax(scores [B, V])."""
        probs = scores.double().softmax(-1)
        rest = torch.einsum("bv,pkv->bpk", probs, self.left)
        taken = probs[:, self.tokens]  # [B, P, k]
        return torch.where(rest > 0, taken / rest, self.tail.double()).prod(-1)

    def rank(self, scores: Tensor, order: Tensor) -> Tensor:
        """Scores [B, V] that put the tokens in that order [B], impossible ones left out."""
        vocab = scores.shape[-1]
        first = self.tokens[order]  # [B, k]
        ranked = -torch.arange(vocab, dtype=torch.float64).expand(scores.shape)
        places = vocab - torch.arange(first.shape[1], dtype=torch.float64)
        ranked = ranked.scatter(1, first, places.expand(first.shape))
        return ranked.masked_fill(scores == -torch.inf, -torch.inf)


@dataclass
class Boxes:
    """Boxes of one batch: their faces, orders, weights, and what a run compared them with."""

    columns: dict[tuple[int, ...], int]  # key -> column of `low` and `high`; grows
    ranks: int
    orders: dict[int, Orders]
    low: Tensor  # [B, K]
    high: Tensor  # [B, K]
    order: Tensor  # [B, K], -1 where not chosen yet
    weight: Tensor  # [B]
    cuts: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)

    @classmethod
    def whole(cls, ranks: int) -> Boxes:
        """The one box that holds everything."""
        none = torch.zeros(1, 0, dtype=torch.float64)
        ones = torch.ones(1, dtype=torch.float64)
        return cls({}, ranks, {}, none, none, none.long(), ones)

    def rows(self, index: Tensor) -> Boxes:
        """Some of the boxes, not run yet."""
        faces = (self.low[index], self.high[index], self.order[index], self.weight[index])
        return Boxes(self.columns, self.ranks, self.orders, *faces)

    def start(self) -> None:
        """Get ready to be run."""
        self.cuts = []
        self._widen()
        self.handed = torch.full_like(self.low, torch.nan)  # [B, K] the points handed out

    def _widen(self) -> None:
        more = len(self.columns) - self.low.shape[1]
        pad = torch.nn.functional.pad
        self.low, self.high = pad(self.low, (0, more)), pad(self.high, (0, more), value=1.0)
        self.order = pad(self.order, (0, more), value=-1)
        if hasattr(self, "handed"):
            self.handed = pad(self.handed, (0, more), value=torch.nan)

    def _at(self, positions: Tensor, stream: int, number: int) -> Tensor:
        """The columns [B, M] of a key per position."""
        distinct, which = positions.unique(return_inverse=True)
        found = []
        for position in distinct.tolist():
            key = (int(stream), position, number)
            found.append(self.columns.setdefault(key, len(self.columns)))
        self._widen()
        return torch.tensor(found)[which].expand(len(self.low), -1)

    def points(self, positions: Tensor, draws: int, stream: int) -> Tensor:
        """A point [B, M, draws] inside each box, no two coordinates of a row alike."""
        at = torch.stack([self._at(positions, stream, draw) for draw in range(draws)], -1)
        flat = at.flatten(1)  # [B, M * draws]
        inside = 0.25 + 0.5 * (flat * 0.6180339887498949).frac()
        low, high = self.low.gather(1, flat), self.high.gather(1, flat)
        point = low + (high - low) * inside
        self.handed.scatter_(1, flat, point)
        return point.view(at.shape)

    def ordered(self, scores: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Scores [B, M, V] that rank the tokens in each box's orders."""
        vocab = scores.shape[-1]
        orders = self.orders.setdefault(vocab, Orders(vocab, self.ranks))
        at = self._at(positions, stream, -1)  # [B, M]
        scores = scores.expand(-1, at.shape[1], -1) if scores.shape[1] == 1 else scores
        at = at.expand(scores.shape[:2])
        ranked = []
        for column, row in zip(at.T, scores.unbind(1), strict=True):
            order = self.order.gather(1, column.unsqueeze(1)).squeeze(1)
            open_ = (order < 0).unsqueeze(1)
            self.cuts.append((column, orders.weights(row).masked_fill(~open_, 0.0), True))
            ranked.append(orders.rank(row, order.clamp(min=0)))
        return torch.stack(ranked, 1)

    def compare(self, uniforms: Tensor, thresholds: Tensor) -> None:
        """Note what uniforms [B * n] are compared with: [B * n, T]."""
        batch = len(self.low)
        value = uniforms.detach().reshape(batch, -1)  # [B, n]
        same = value.unsqueeze(-1) == self.handed.unsqueeze(1)  # [B, n, K]
        assert (same.sum(-1) == 1).all(), "a uniform that nobody handed out"
        column = same.byte().argmax(-1)  # [B, n]
        for number, bounds in enumerate(thresholds.reshape(batch, value.shape[1], -1).unbind(1)):
            self.cuts.append((column[:, number], bounds.double(), False))

    def split(self) -> tuple[Tensor, Boxes]:
        """Which boxes [B] are whole, and the pieces of the others, each cut in one coordinate."""
        todo = torch.ones_like(self.weight, dtype=torch.bool)
        pieces = []
        for column, bounds, is_order in self.cuts:
            at = column.unsqueeze(1)
            if is_order:
                row, chosen = ((bounds > 0) & todo.unsqueeze(1)).nonzero(as_tuple=True)
                piece = self.rows(row)
                piece.weight = piece.weight * bounds[row, chosen]
                piece.order.scatter_(1, at[row], chosen.unsqueeze(1))
            else:
                low, high = self.low.gather(1, at), self.high.gather(1, at)
                inner = (bounds > low + EDGE) & (bounds < high - EDGE) & todo.unsqueeze(1)
                row = inner.any(1).nonzero().squeeze(1)
                edges = torch.where(inner, bounds, low)[row].sort(-1).values
                edges = torch.cat([low[row], edges, high[row]], 1)
                width = edges.diff()
                which, place = (width > EDGE).nonzero(as_tuple=True)
                piece = self.rows(row[which])
                share = width[which, place] / (high - low)[row[which], 0]
                piece.weight = piece.weight * share
                faces = at[row[which]]
                piece.low.scatter_(1, faces, edges[which, place].unsqueeze(1))
                piece.high.scatter_(1, faces, edges[which, place + 1].unsqueeze(1))
            todo[row] = False
            pieces.append(piece)

        def merged(name: str) -> Tensor:
            return torch.cat(
                [getattr(piece, name) for piece in [*pieces, self.rows(todo.nonzero()[:0, 0])]]
            )

        faces = (merged("low"), merged("high"), merged("order"), merged("weight"))
        return todo, Boxes(self.columns, self.ranks, self.orders, *faces)


@dataclass(frozen=True)
class Boxed(Sampling):
    """Sampling whose randomness is a batch of boxes."""

    boxes: Any = None

    def uniforms(self, positions: Tensor, draws: int, stream: Stream) -> Tensor:
        return self.boxes.points(positions, draws, stream)

    def perturb(
        self,
        scores: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
        stream: Stream = Stream.TARGET,
    ) -> Tensor:
        assert stream == Stream.CHILDREN, "only the order of children is enumerated"
        return self.boxes.ordered(scores, positions, stream)


@contextmanager
def watched(boxes: Boxes) -> Iterator[None]:
    """Note every comparison that `accepts` and `draw` make, wherever the product calls them."""

    def accepts(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(uniforms: Tensor, probability: Tensor) -> Tensor:
            boxes.compare(uniforms, probability)
            return true(uniforms, probability)

        return noted

    def draw(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(probabilities: Tensor, uniforms: Tensor) -> Tensor:
            running = probabilities.cumsum(-1)
            bounds = (running / running[..., -1:]).nan_to_num(0.0)[..., :-1]
            each = bounds.unsqueeze(-2).expand(*uniforms.shape, -1)
            boxes.compare(uniforms, each)
            return true(probabilities, uniforms)

        return noted

    for rule in RULES.values():
        assert rule.accept  # imports its module, whose names would else stay replaced
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for attribute, wrap in (("accepts", accepts), ("draw", draw)):
                if name.startswith("headstart.") and hasattr(module, attribute):
                    patch = mock.patch.object(module, attribute, wrap(getattr(module, attribute)))
                    stack.enter_context(patch)
        yield


class Tables:
    """A target and a drafter whose logits are drawn at random for every text, and looked up.

    Args:
        vocab: V.
        depth: D of the trees; the target answers for texts of up to D tokens.
        kind: `levels` proposes after each node's own text, `heads` by the depth alone, and `lookup`
            offers up to three candidates after each text, without probabilities.
        narrow: target ids that the drafter knows, or None for all.
        apart: how far the drafter's logits are from the target's.
    """

    def __init__(
        self,
        vocab: int,
        depth: int,
        seed: int = 0,
        kind: str = "levels",
        narrow: list[int] | None = None,
        apart: float = 1.0,
    ):
        draw = torch.Generator().manual_seed(seed)
        self.vocab, self.depth, self.max_depth = vocab, depth, depth
        self.config = SimpleNamespace(vocab_size=vocab)
        self.kind, self.independent = kind, kind == "heads"
        self.vocabulary = None if narrow is None else torch.tensor(narrow)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, vocab, generator=draw, dtype=torch.float64)

        self.target = [normal(vocab**d) for d in range(depth + 1)]
        drafts = [logits + apart * normal(len(logits)) for logits in self.target[:depth]]
        # Tokens that one side thinks impossible, after some of the texts.
        for level, logits in enumerate((*self.target, *drafts)):
            rows = torch.arange(len(logits))[seed % 3 :: 3]
            logits[rows, (rows + level) % vocab] = -torch.inf
        if self.independent:
            drafts = [logits[:1] for logits in drafts]
        self.drafts = drafts if narrow is None else [logits[:, narrow] for logits in drafts]

    def codes(self, tree: TokenTree) -> Tensor:
        """[B, N] the number of each node's text among the texts of its length."""
        shape = tree.topology
        codes = torch.zeros_like(tree.tokens)
        for depth in range(1, shape.max_depth + 1):
            above = codes.gather(1, shape.parent_or_root)
            codes = torch.where(shape.depth == depth, above * self.vocab + tree.tokens, codes)
        return codes

    def verify(self, tree: TokenTree) -> Tensor:
        """The target's logits [B, N, V]."""
        codes, depth = self.codes(tree), tree.topology.depth
        first = torch.tensor([0, *(len(t) for t in self.target)]).cumsum(0)
        return torch.cat(self.target)[first[depth] + codes]

    def conditionals(self, processors: LogitsProcessorList) -> list[Tensor]:
        """The target's processed probabilities after every text: [V ** d, V] for d = 0 … D."""
        found = []
        for depth, logits in enumerate(self.target):
            texts = list(itertools.product(range(self.vocab), repeat=depth))
            prefix = torch.tensor(texts, dtype=torch.long).view(len(texts), depth)
            prefix = torch.nn.functional.pad(prefix, (1, 0), value=ROOT)
            found.append(processors(prefix, logits.clone()).softmax(-1))  # type: ignore[arg-type]
        return found

    # What a policy asks of a drafter.

    def start(self) -> Any:
        """A round's state."""
        return SimpleNamespace()

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        batch = len(tokens)
        state.codes = torch.zeros(batch, 1, dtype=torch.long)  # the root's, then the grown nodes'
        state.depths = torch.zeros(batch, 1, dtype=torch.long)
        if self.independent:
            return self._step(torch.cat(self.drafts).expand(batch, -1, -1))
        return self._step(self.drafts[0].expand(batch, 1, -1))

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        assert not self.independent
        codes = state.codes.gather(1, parent + 1) * self.vocab + tokens
        depths = state.depths.gather(1, parent + 1) + 1
        state.codes = torch.cat([state.codes, codes], 1)
        state.depths = torch.cat([state.depths, depths], 1)
        first = torch.tensor([0, *(len(t) for t in self.drafts)]).cumsum(0)
        return self._step(torch.cat(self.drafts)[first[depths] + codes])

    def _step(self, logits: Tensor) -> Step:
        if self.kind == "lookup":
            best = logits.topk(min(3, self.vocab)).indices
            few = (best[..., :1] + torch.arange(best.shape[-1])) % self.vocab >= self.vocab - 1
            return Step(ids=best.masked_fill(few, -1).sort(-1, descending=True).values)
        return Step(logits, self.vocabulary)


class SeveralTables(Tables):
    """One target, and drafters of their own kinds; `narrow` is what the first one knows.

    Args:
        kinds: see `Tables`, one for each drafter, joined by +.
    """

    def __init__(
        self,
        vocab: int,
        depth: int,
        seed: int = 0,
        kinds: str = "levels+heads",
        narrow: list[int] | None = None,
        apart: float = 1.0,
    ):
        first, *rest = kinds.split("+")
        super().__init__(vocab, depth, seed, first, narrow, apart)
        # The others draft for the same target, but are wrong in their own ways.
        others = [Tables(vocab, depth, seed, kind) for kind in rest]
        for number, other in enumerate(others, start=1):
            draw = torch.Generator().manual_seed(seed + 100 * number)
            for logits in other.drafts:
                noise = torch.randn(logits.shape, generator=draw, dtype=torch.float64)
                logits += apart * noise
        alone: list[Any] = [Tables(vocab, depth, seed, first, narrow, apart), *others]
        self.members = [GroupMember(each, number, [], 0) for number, each in enumerate(alone)]

    def start(self) -> Any:
        return [SimpleNamespace() for _ in self.members]


@dataclass(frozen=True)
class Law:
    """What a round does.

    Attributes:
        law: [V ** (D + 1)], the joint law of D + 1 tokens; what the round does not write of them is
            the target's own.
        lengths: [D + 2], how probable it is that the round writes 0 … D + 1 tokens.
        boxes: how many boxes it took.
    """

    law: Tensor
    lengths: Tensor
    boxes: int


@dataclass(frozen=True)
class Round:
    """One round of a rule on a policy's trees over `tables`."""

    tables: Tables
    policy: Policy
    rule: Rule
    expansion: Expansion
    processors: LogitsProcessorList

    def play(self, sampling: Sampling, batch: int) -> Accepted:
        """Grow, verify and accept, as the loop does, for `batch` rows."""
        long = torch.long
        depth = self.policy.max_depth
        root = torch.full((batch, 1), ROOT, dtype=long)
        lengths = torch.full((batch,), POSITION, dtype=long)
        nothing = torch.zeros(batch, 1, 0)
        committed = Committed(nothing, root, torch.ones(batch, dtype=long), lengths)
        drafter: Any = self.tables
        if (forms := sampling.forms) is not None:
            drafter = proposer(MaskedProposals(members(drafter), forms, [root[0].numpy()] * batch))
        children = Children(self.expansion, sampling)
        tree = self.policy.grow(drafter, self.tables.start(), committed, children)
        logits = self.tables.verify(tree)
        seen = seen_in(root, self.tables.vocab) if sampling.penalty else None
        text = Text(torch.nn.functional.pad(root, (0, depth + 2)), 1, seen=seen)
        return self.rule.accept(Verified(tree, logits, sampling, lengths, text))

    def target_law(self) -> Tensor:
        """The target's own joint law of D + 1 tokens, [V ** (D + 1)]."""
        law = torch.ones(1, dtype=torch.float64)
        for after in self.tables.conditionals(self.processors):
            law = (law.unsqueeze(1) * after).flatten()
        return law

    def law(self, ranks: int | None = None) -> Law:
        """Enumerate the round, with orders of `ranks` tokens; of a node's children when None."""
        if ranks is None:
            parts = getattr(self.policy, "parts", [self.policy])
            ranks = max(1, *(int(getattr(part, "width", 1)) for part in parts))
        vocab, depth = self.tables.vocab, self.policy.max_depth
        written = [torch.zeros(vocab**d, dtype=torch.float64) for d in range(depth + 2)]
        waiting, count = [Boxes.whole(ranks)], 0
        while waiting:
            boxes = waiting.pop()
            boxes.start()
            batch = len(boxes.weight)
            seeds = torch.zeros(batch, dtype=torch.long)
            sampling = Boxed(seeds, self.processors, torch.float64, boxes=boxes)
            with watched(boxes):
                accepted = self.play(sampling, batch)
            done, pieces = boxes.split()
            count += int(done.sum())
            self._write(written, accepted, done, boxes.weight)
            waiting += [
                pieces.rows(index)
                for index in torch.arange(len(pieces.weight)).split(ROWS)
                if len(index)
            ]
        law = written[0]
        for after, mass in zip(self.tables.conditionals(self.processors), written[1:], strict=True):
            law = mass + (law.unsqueeze(1) * after).flatten()
        return Law(law, torch.stack([mass.sum() for mass in written]), count)

    def _write(
        self, written: list[Tensor], accepted: Accepted, done: Tensor, weight: Tensor
    ) -> None:
        vocab = self.tables.vocab
        for length in accepted.count[done].unique().tolist():
            mine = done & (accepted.count == length)
            tokens = accepted.tokens[mine, :length]
            assert ((tokens >= 0) & (tokens < vocab)).all()
            code = torch.zeros_like(tokens[:, 0])
            for token in tokens.T:
                code = code * vocab + token
            written[length].index_add_(0, code, weight[mine])

    def distance(self, ranks: int | None = None) -> float:
        """Total variation between the round's law and the target's; see `law`."""
        return float((self.law(ranks).law - self.target_law()).abs().sum() / 2)
