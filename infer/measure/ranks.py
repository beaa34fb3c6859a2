"""Recorded ranks: the rank at which a drafter's proposals hold each token of the target's text.

Recorded once along the target's own text, they give what any tree of the drafter's best
tokens would have accepted, round by round, without running the target again (see `replay`), and
the tree that would have accepted most.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads import Drafter, Sampling, Step
from headstart.heads.core import FINAL, OutputLayer, row_seeds
from headstart.heads.group import fused_layers

from ..rules.registry import find_rule
from ..trees.children import Children, rows_of
from .own_text import BATCH, Tick, Written, processors_of

MISSED = 1 << 20
"""The rank of a token that was not proposed, or that is past the end of the text."""

RANKS = 10
"""Ranks that small trees use: few prompts overrate the deeper ones."""

_DEPTH = 8  # levels recorded of a drafter that has no bound of its own


@torch.no_grad()
def measure_ranks(
    drafter: Drafter,
    texts: Sequence[Written],
    depth: int | None = None,
    tick: Tick = lambda: None,
    temperature: float = 0.0,
) -> list[Tensor]:
    """Record a drafter's ranks through the calls of its contract alone.

    Each written token but the last is the root of a round in turn, and the tree grown from it is
    the text itself: x0 x1 | x2 x3 x4 after a prompt of two tokens gives

        begin(f1, x2) -> the rank of x3;  extend(x3) -> the rank of x4
        begin(f2, x3) -> the rank of x4

    A drafter that observes is shown what the target answers to each root, after that root's round.
    While decoding it also sees the nodes that are rejected, and may then be right more often.

    Args:
        texts: see `write_texts`.
        depth: K, the levels recorded; None takes the drafter's own bound, or 8.
        tick: called after each batch of texts.
        temperature: that the texts were sampled at, with their seeds; 0 is greedily. The ranks are
            then those after the noise of the text, which children of the usual rule share.

    Returns:
        For each text [M, K] int64 on the CPU, M its written tokens but one; entry (i, d - 1) is the
        rank, 0 the best, of the token that was written d tokens after the i-th; see `MISSED`.
    """
    bound = drafter.max_depth
    depth = (bound or _DEPTH) if depth is None else min(depth, bound or depth)
    was_training = drafter.training
    drafter.eval()
    ranks: list[Tensor] = []
    sampling = _sampling_at(drafter.target, temperature) if temperature else None
    for start in range(0, len(texts), BATCH):
        ranks += _record(drafter, texts[start : start + BATCH], depth, sampling)
        tick()
    drafter.train(was_training)
    return ranks


def _sampling_at(target: Any, temperature: float) -> Sampling:
    """How a target's requests sample at a temperature, by its own generation config; no seeds."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    return Sampling(None, processors_of(target, ids, do_sample=True, temperature=temperature))


def _record(
    drafter: Drafter, texts: Sequence[Written], depth: int, sampling: Sampling | None
) -> list[Tensor]:
    """`measure_ranks` of one batch."""
    tokens = pad_sequence([text.tokens for text in texts], batch_first=True)  # [B, T]
    device, (batch, longest) = tokens.device, tokens.shape
    read = [text.features.to(device) for text in texts]
    features = pad_sequence(read, batch_first=True)  # [B, T, F]
    length = torch.tensor([len(text.tokens) for text in texts], device=device)
    prompt = torch.tensor([text.prompt for text in texts], device=device)
    rounds = [len(text.tokens) - text.prompt - 1 for text in texts]
    first = max(text.prompt for text in texts)
    fused, state = fused_layers(drafter), drafter.start(batch, longest + depth + 1)
    drafter.prefill(state, features[:, :first], tokens[:, :first], prompt)
    row = torch.arange(batch, device=device)
    children = Children()
    if sampling is not None:
        seeds = row_seeds([text.seed for text in texts], batch, device)
        children = Children(find_rule(None).children, replace(sampling, seeds=seeds))
    ranks = torch.full((batch, max(rounds), depth), MISSED, device=device)  # [B, M, K]
    answers = _answers(drafter, features) if drafter.observes else None
    for place in range(max(rounds)):
        root = (prompt + place).clamp(max=longest - 1)  # [B]
        active = (root + 1 < length).long()
        after = [tokens[row, (root + d).clamp(max=longest - 1)] for d in range(depth + 1)]
        drafter.reserve(state, min(first + place, longest - 1), depth + 1)
        given = features[row, root - 1].unsqueeze(1), after[0].unsqueeze(1), active
        with fused:
            step = drafter.begin(state, *given)
        for level in range(depth):
            if level and not drafter.independent:
                # The first node's parent is the root (-1), each later one's the node before it.
                parent = torch.full((batch, 1), level - 2, device=device)
                with fused:
                    step = drafter.extend(state, after[level].unsqueeze(1), parent)
            own = rows_of(step, level, level + 1) if drafter.independent else step
            rank = _rank(own, children.scores(own, root, level + 1), after[level + 1])
            ranks[:, place, level] = rank.masked_fill(root + level + 1 >= length, MISSED)
        if answers is not None:
            logits, true = answers(row, root).unsqueeze(1), active.unsqueeze(1) > 0
            drafter.observe(state, after[0].unsqueeze(1), logits, true)
    return [each[:count] for each, count in zip(ranks.cpu(), rounds, strict=True)]


def _answers(drafter: Drafter, features: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The target's logits [B, V] at a place [B] of each row [B], of features [B, T, F]."""
    layers, output = drafter.config.feature_layers, OutputLayer(drafter.target)
    final = features.chunk(len(layers), dim=-1)[list(layers).index(FINAL)]  # [B, T, D]
    return lambda row, place: output.raw(final[row, place])


def _rank(step: Step, scores: Tensor | None, wanted: Tensor) -> Tensor:
    """The ranks of the tokens `wanted` [B] in a Step of one row; equal scores rank by id.  # [B]

    Args:
        scores: see `Children.scores`.
    """
    if step.ids is not None:
        hit = step.top(step.ids.shape[-1], scores)[:, 0] == wanted.unsqueeze(1)  # [B, k]
        return torch.where(hit.any(1), hit.byte().argmax(1), MISSED)
    given: Any = step.logits if scores is None else scores
    logits, column, known = given[:, 0], wanted, torch.ones_like(wanted).bool()
    if step.vocabulary is not None:
        hit = step.vocabulary == wanted.unsqueeze(1)  # [B, Vd]
        column, known = hit.byte().argmax(1), hit.any(1)
    column = column.unsqueeze(1)
    logit = logits.gather(1, column)
    lower_id = torch.arange(logits.shape[1], device=logits.device) < column
    better = ~(logits <= logit) | ((logits == logit) & lower_id)  # NaN counts as better
    return torch.where(known, better.sum(1), MISSED)


def acceptance(ranks: Sequence[Tensor], width: int = RANKS) -> np.ndarray:
    """[K, W], the acceptance vector of each depth: how often the true token has each rank.

    Args:
        ranks: see `measure_ranks`.
        width: W, the ranks counted, from the best on.

    >>> acceptance([torch.tensor([[0, 1], [0, MISSED]])], width=2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    rows = torch.cat(list(ranks)).numpy()
    counts = np.stack([(rows == rank).sum(0) for rank in range(width)], 1)  # [K, W]
    # At level d the last d tokens of a text have no token to compare with.
    compared = [sum(max(len(each) - d, 0) for each in ranks) for d in range(len(counts))]  # [K]
    return counts / np.maximum(compared, 1)[:, None]


@dataclass(frozen=True)
class Replayed:
    """Tokens that a tree would have emitted in rounds, and the rounds, for each text.

    Attributes:
        accepted: of all texts, how many rounds accepted so many drafted tokens with so many
            tokens of the text left to compare with.
    """

    tokens: list[int]
    rounds: list[int]
    accepted: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def tau(self) -> float:
        """Tokens per round; 1 where no text needed a round."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else 1.0

    def acceptance_by_depth(self, depth: int) -> list[float | None]:
        """Acceptance at depth 1 … `depth`, given that the parent was; None where none was.

        Past a text's end there is nothing to compare with, which is no rejection.

        >>> Replayed([6], [3], {(0, 6): 1, (2, 5): 1, (2, 2): 1}).acceptance_by_depth(4)
        [0.6666666666666666, 1.0, 0.0, None]
        """
        found = []
        for k in range(1, depth + 1):
            tried = {key: n for key, n in self.accepted.items() if key[0] >= k - 1 and key[1] >= k}
            taken = sum(n for (count, _), n in tried.items() if count >= k)
            found.append(taken / sum(tried.values()) if tried else None)
        return found


def replay(ranks: Sequence[Tensor], paths: Sequence[Sequence[int]]) -> Replayed:
    """Count the rounds that the decode loop would run with a tree of the drafter's best tokens.

    Args:
        ranks: see `measure_ranks`.
        paths: the tree's rank paths, every one with its prefixes.

    >>> replay([torch.tensor([[0, 1], [0, 0], [0, 9]])], [[0], [0, 0]])
    Replayed(tokens=[3], rounds=[2])
    """
    tree = {tuple(path) for path in paths}
    rounds = [[(n, len(row) - at) for at, n in _rounds(row, tree)] for row in map(_rows, ranks)]
    accepted = Counter(each for row in rounds for each in row)
    return Replayed([len(each) for each in ranks], [len(each) for each in rounds], dict(accepted))


def path_shares(ranks: Sequence[Tensor], paths: Sequence[Sequence[int]]) -> list[float]:
    """How often each path is what the target wrote, over all positions that it may begin at.

    >>> path_shares([torch.tensor([[0, 1], [0, 0], [1, 0]])], [[0], [0, 0], [1]])
    [0.6666666666666666, 0.3333333333333333, 0.3333333333333333]
    """
    rows = [position for each in ranks for position in _rows(each)]
    counts = Counter(row[: len(path)] for path in {tuple(p) for p in paths} for row in rows
                     if row[: len(path)] == path)  # fmt: skip
    return [counts[tuple(path)] / max(len(rows), 1) for path in paths]


def _rows(ranks: Tensor) -> list[tuple[int, ...]]:
    return [tuple(position) for position in ranks.tolist()]


def _rounds(row: list[tuple[int, ...]], tree: set[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Where each round of a text starts, and how many of the tree's nodes it accepts."""
    at = 0
    while at < len(row):
        depth = 0
        while depth < len(row[at]) and row[at][: depth + 1] in tree:
            depth += 1
        yield at, depth
        at += depth + 1


def best_tree(
    ranks: Sequence[Tensor], nodes: int, passes: int = 4, width: int = RANKS
) -> list[list[int]]:
    """The static tree of `nodes` nodes, the root counted, that accepts most (Medusa's sparse tree).

    A position accepts the node of rank path (r1 … rd) when the true tokens have exactly those
    ranks. The tokens that a tree accepts are therefore a sum over its nodes of how often each path
    occurs, and the most frequent paths make the best tree; a path is never more frequent than its
    prefix. (Medusa multiplies the heads' accuracies instead, as if the heads erred independently.)
    Only positions at which a round starts count, and these depend on the tree. So the search
    starts from the best tree for all positions, repeats with the positions at which the previous
    tree's rounds start, and keeps the best tree.

    Args:
        ranks: see `measure_ranks`.
        passes: how often the search repeats.
        width: ranks that a node may have.

    Returns:
        Rank paths, most frequent first.

    >>> best_tree([torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0]])], nodes=3, passes=1)
    [[0], [0, 0]]
    """
    rows = [_rows(each) for each in ranks]
    starts = [position for row in rows for position in row]
    best: tuple[float, list[list[int]]] = (0.0, [])
    for _ in range(passes):
        counts: Counter[tuple[int, ...]] = Counter()
        for position in starts:
            likely = itertools.takewhile(lambda rank: rank < width, position)
            counts.update(itertools.accumulate((rank,) for rank in likely))
        # Shorter first among equals, so that every path comes after its prefixes.
        order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        paths = order[: nodes - 1]
        walked = [(row[at], depth) for row in rows for at, depth in _rounds(row, set(paths))]
        starts = [position for position, _ in walked]
        emitted = sum(depth + 1 for _, depth in walked)
        if starts and emitted / len(starts) > best[0]:
            best = emitted / len(starts), [list(path) for path in paths]
    return best[1]
