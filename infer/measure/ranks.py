"""Recorded ranks: where each of a drafter's lists holds the token that the target went on to write.

Recorded once along the target's own greedy text, they tell what any tree of the drafter's best
tokens would have accepted, round by round, without running the target again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import Drafter, OptionError, Step
from headstart.heads.core import capture

from ..speculator import Speculator

MISSED = 1 << 20
"""The rank of a token that is not in the list, or that was never written."""

BATCH = 32  # texts written and recorded at once
_DEPTH = 8  # levels recorded of a drafter that has no bound of its own
RANKS = 10  # deeper ones are not worth a node of a small tree, and few prompts overrate them

Tick = Callable[[], object]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Written:
    """A prompt and the target's greedy continuation.

    Attributes:
        tokens: [T] int64, the prompt included.
        features: [T, F], the target's, as the drafter reads them.
        prompt: how many of the tokens are prompt.
    """

    tokens: Tensor
    features: Tensor
    prompt: int


@torch.no_grad()
def write_texts(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    new_tokens: int,
    tick: Tick = lambda: None,
) -> list[Written]:
    """Let the target continue each prompt greedily, as far as its end token.

    Args:
        prompts: token ids, each [P] or [1, P].
        tick: called after each batch of prompts.

    Raises:
        OptionError: no prompt, or fewer than two new tokens.
    """
    if not prompts or new_tokens < 2:
        raise OptionError(
            f"found {len(prompts)} prompts and {new_tokens} new tokens; recording ranks needs at "
            "least 1 and 2."
        )
    plain = Speculator(target)
    layers = tuple(drafter.config.feature_layers)
    rows: list[Written] = []
    for batch in _batches(prompts):
        texts = _continue(plain, [prompt.flatten() for prompt in batch], new_tokens)
        features = capture(target, layers, pad_sequence(texts, batch_first=True))  # [B, T, F]
        each = zip(texts, features, batch, strict=True)
        rows += [Written(t, f[: len(t)].clone(), prompt.numel()) for t, f, prompt in each]
        tick()
    return rows


def decode_greedily(speculator: Speculator, prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Decode a batch of prompts [P]: [B, the longest P + new] int64, padded on the left."""
    device = speculator.device
    flipped = pad_sequence([prompt.flip(0) for prompt in prompts], batch_first=True)
    mask = pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True).flip(1)
    return speculator.generate(
        flipped.flip(1).to(device),
        attention_mask=mask.to(device),
        max_new_tokens=new_tokens,
        do_sample=False,
    )


def _continue(plain: Speculator, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
    """The prompts [P] with what the target writes after them, each [T]."""
    ids = decode_greedily(plain, prompts, new_tokens)
    longest = max(map(len, prompts))
    written = 1 + plain.stats.counts.sum(0)
    ends = longest + np.broadcast_to(written, len(prompts))
    rows = zip(ids, prompts, ends.tolist(), strict=True)
    return [row[longest - len(prompt) : end] for row, prompt, end in rows]


@torch.no_grad()
def measure_ranks(
    drafter: Drafter,
    texts: Sequence[Written],
    depth: int | None = None,
    tick: Tick = lambda: None,
) -> list[Tensor]:
    """Record a drafter's ranks through the calls of its contract alone.

    Each written token but the last is taken for the root of a round, one after another, and the
    tree grown from it is the true text: x0 x1 | x2 x3 x4 after a prompt of two tokens gives

        begin(f1, x2) -> the rank of x3;  extend(x3) -> the rank of x4
        begin(f2, x3) -> the rank of x4

    Args:
        texts: see `write_texts`.
        depth: K, the levels recorded; None takes the drafter's own bound, or 8.
        tick: called after each batch of texts.

    Returns:
        For each text [M, K] int64 on the CPU, M its written tokens but one; entry (i, d - 1) is the
        rank, 0 the best, of the token that was written d tokens after the i-th; see `MISSED`.
    """
    bound = drafter.max_depth
    depth = (bound or _DEPTH) if depth is None else min(depth, bound or depth)
    was_training = drafter.training
    drafter.eval()
    ranks: list[Tensor] = []
    for batch in _batches(texts):
        ranks += _record(drafter, batch, depth)
        tick()
    drafter.train(was_training)
    return ranks


def _record(drafter: Drafter, texts: Sequence[Written], depth: int) -> list[Tensor]:
    tokens = pad_sequence([text.tokens for text in texts], batch_first=True)  # [B, T]
    features = pad_sequence([text.features for text in texts], batch_first=True)  # [B, T, F]
    device, (batch, longest) = tokens.device, tokens.shape
    length = torch.tensor([len(text.tokens) for text in texts], device=device)
    prompt = torch.tensor([text.prompt for text in texts], device=device)
    rounds = [len(text.tokens) - text.prompt - 1 for text in texts]
    first = max(text.prompt for text in texts)
    state = drafter.start(batch, longest + depth + 1)
    drafter.prefill(state, features[:, :first], tokens[:, :first], prompt)
    row = torch.arange(batch, device=device)
    found = []
    for place in range(max(rounds)):
        root = (prompt + place).clamp(max=longest - 1)  # [B]
        active = (root + 1 < length).long()
        after = [tokens[row, (root + d).clamp(max=longest - 1)] for d in range(depth + 1)]
        drafter.reserve(state, min(first + place, longest - 1), depth + 1)
        step = drafter.begin(
            state, features[row, root - 1].unsqueeze(1), after[0].unsqueeze(1), active
        )
        levels = []
        for level in range(depth):
            if level and not drafter.independent:
                # The first node hangs from the root (-1), each later one from the node before it.
                parent = torch.full((batch, 1), level - 2, device=device)
                step = drafter.extend(state, after[level].unsqueeze(1), parent)
            rank = _rank(step, level if drafter.independent else 0, after[level + 1])
            levels.append(rank.masked_fill(root + level + 1 >= length, MISSED))
        found.append(torch.stack(levels, 1))
    if not found:
        return [torch.empty(0, depth, dtype=torch.long)] * batch
    ranks = torch.stack(found, 1).cpu()  # [B, M, K]
    return [each[:count] for each, count in zip(ranks, rounds, strict=True)]


def _rank(step: Step, row: int, wanted: Tensor) -> Tensor:
    """Where the lists of a Step's row hold the tokens `wanted` [B], equals by id.  # [B]"""
    if step.ids is not None:
        hit = step.ids[:, row] == wanted.unsqueeze(1)  # [B, k]
        return torch.where(hit.any(1), hit.byte().argmax(1), MISSED)
    assert step.logits is not None
    logits, column, known = step.logits[:, row].float(), wanted, None
    if step.vocabulary is not None:
        hit = step.vocabulary == wanted.unsqueeze(1)  # [B, Vd]
        column, known = hit.byte().argmax(1), hit.any(1)
    column = column.unsqueeze(1)
    mine = logits.gather(1, column)
    earlier = torch.arange(logits.shape[1], device=logits.device) < column
    better = ~(logits <= mine) | ((logits == mine) & earlier)  # NaN is no good rank
    rank = better.sum(1)
    return rank if known is None else torch.where(known, rank, MISSED)


def acceptance(ranks: Sequence[Tensor], width: int = RANKS) -> tuple[np.ndarray, np.ndarray]:
    """The acceptance vector: how often the true token stands at rank b.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.
        width: W, the ranks that are told apart.

    Returns:
        By depth [K, W], and over all depths [W].

    >>> by_depth, pooled = acceptance([torch.tensor([[0, 1], [0, MISSED]])], width=2)
    >>> by_depth.tolist(), pooled.round(2).tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [0.67, 0.33])
    """
    rows = torch.cat(list(ranks)).numpy()
    counts = np.stack([(rows == rank).sum(0) for rank in range(width)], 1)  # [K, W]
    # The last tokens of a text have nothing after them at the deeper levels.
    ends = [min(d, len(each)) for each in ranks for d in range(each.shape[1])]
    told = len(rows) - np.array(ends).reshape(len(ranks), -1).sum(0)  # [K]
    return counts / np.maximum(told, 1)[:, None], counts.sum(0) / max(int(told.sum()), 1)


@dataclass(frozen=True)
class Replayed:
    """What a tree would have done with recorded ranks.

    Attributes:
        tokens: emitted in rounds, for each text.
        rounds: rounds, for each text.
    """

    tokens: list[int]
    rounds: list[int]

    @property
    def tau(self) -> float:
        """Tokens per round; 1 where no text needed a round."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else 1.0


def replay(ranks: Sequence[Tensor], paths: Sequence[Sequence[int]]) -> Replayed:
    """Walk the rounds that the loop would run with a tree of the drafter's best tokens.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.
        paths: the tree's rank paths, every one with its prefixes.

    >>> replay([torch.tensor([[0, 1], [0, 0], [0, MISSED]])], [[0], [0, 0]])
    Replayed(tokens=[3], rounds=[2])
    """
    tree = {tuple(path) for path in paths}
    tokens, rounds = [], []
    for each in ranks:
        row = [tuple(position) for position in each.tolist()]
        tokens.append(len(row))
        rounds.append(sum(1 for _ in _rounds(row, tree)))
    return Replayed(tokens, rounds)


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

    A position accepts the node of rank path (r1 … rd) when the true tokens stand at just those
    ranks, so the tokens that a tree accepts are a sum over its nodes of how often each path occurs,
    and the most frequent paths make the best tree; a path is never more frequent than its prefix.
    Medusa multiplies the heads' accuracies instead, as if the heads erred independently. Only
    positions at which a round starts count, and these depend on the tree: it is found by walking
    the rows with the previous tree, from the tree for all positions on, and the best one is kept.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.
        width: how many ranks a node may have.

    Returns:
        Rank paths, most frequent first.

    >>> best_tree([torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0]])], nodes=3, passes=1)
    [[0], [0, 0]]
    """
    rows = [[tuple(position) for position in row.tolist()] for row in ranks]
    starts = [position for row in rows for position in row]
    best: tuple[float, list[list[int]]] = (0.0, [])
    for _ in range(passes):
        counts: Counter[tuple[int, ...]] = Counter()
        for position in starts:
            likely = itertools.takewhile(lambda rank: rank < width, position)
            counts.update(itertools.accumulate((rank,) for rank in likely))
        # Shorter first among equals, so that every path comes after its prefixes.
        order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        paths = {path for path in order[: nodes - 1]}
        walked = [(row[at], depth) for row in rows for at, depth in _rounds(row, paths)]
        starts = [position for position, _ in walked]
        emitted = sum(depth + 1 for _, depth in walked)
        if starts and emitted / len(starts) > best[0]:
            best = emitted / len(starts), [list(path) for path in order[: nodes - 1]]
    return best[1]


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
