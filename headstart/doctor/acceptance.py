"""Acceptance of a drafter along the target's own text, and how much two ways of decoding differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads import OptionError
from headstart.heads.core import row_seeds, trained_context
from headstart.infer import Speculator, Stats
from headstart.infer.measure.noise import Gain, paired_gain
from headstart.infer.measure.own_text import BATCH, continue_texts, with_features
from headstart.infer.measure.ranks import measure_ranks
from headstart.long_prompts import is_cut, room_for, taken
from headstart.train.data.documents import Document

from .pairs import Pair

_BINS = 4  # of positions


@dataclass(frozen=True)
class Accepted:
    """How many drafted tokens of a chain the target would accept, a round begun at every token.

    Attributes:
        counts: of each prompt that was decoded, [M] accepted tokens of the round at each place of
            the target's greedy text. Rounds that the text's end would cut are left out, but for the
            first one of a text that is shorter than the chain.
        prompts: the tokens of each prompt.
        documents: which of the documents given each prompt is of.
        depth: of the chain.
        texts: the token ids of each text, prompt included.
    """

    counts: list[np.ndarray]
    prompts: list[int]
    documents: list[int]
    depth: int
    texts: list[Tensor]

    @property
    def tau(self) -> float:
        """Tokens a round, if a round began at every token."""
        return 1 + float(np.concatenate(self.counts).mean())

    @property
    def by_depth(self) -> list[float | None]:
        """The share of drafted tokens accepted at depth 1 … K, given that the one before was."""
        every = np.concatenate(self.counts)
        reached = [int((every >= depth).sum()) for depth in range(self.depth + 1)]
        return [b / a if a else None for a, b in itertools.pairwise(reached)]

    def by_position(self) -> list[dict[str, Any]]:
        """τ in up to four ranges of the position in the context, of about as many rounds each."""
        places = [at + np.arange(len(c)) for at, c in zip(self.prompts, self.counts, strict=True)]
        where, every = np.concatenate(places), np.concatenate(self.counts)
        edges = np.unique(np.quantile(where, np.linspace(0, 1, _BINS + 1)).astype(int))
        found = []
        for low, high in itertools.pairwise(edges):
            last = high == edges[-1]
            inside = (where >= low) & ((where <= high) if last else (where < high))
            if inside.any():
                end = int(high) if last else int(high) - 1
                tau = 1 + float(every[inside].mean())
                found.append({"from": int(low), "to": end, "tau": tau, "rounds": int(inside.sum())})
        return found

    def of(self, documents: set[int]) -> float | None:
        """τ of some documents; None where none of them was decoded."""
        pairs = zip(self.documents, self.counts, strict=True)
        chosen = [counts for document, counts in pairs if document in documents]
        return 1 + float(np.concatenate(chosen).mean()) if chosen else None

    def first_round(self) -> float:
        """τ of each answer's first round, whose root is the answer's first token."""
        return 1 + float(np.mean([counts[0] for counts in self.counts]))


def gain(before: Accepted, after: Accepted) -> Gain:
    """What a change gains on the prompts that both decoded."""
    common = sorted(set(before.documents) & set(after.documents))
    sums = []
    for way in (before, after):
        at = {document: way.counts[i] for i, document in enumerate(way.documents)}
        sums.append(np.array([[at[j].sum(), len(at[j])] for j in common], float).reshape(-1, 2))
    return paired_gain(*sums)


class Decodes:
    """Measures pairs on the same documents; a target's text is written once for each rendering.

    Args:
        depth: K of the chain that is drafted, as far as the drafter goes.
    """

    def __init__(self, documents: Sequence[Document], new_tokens: int, depth: int):
        self.documents, self.new_tokens, self.depth = documents, new_tokens, depth
        self._texts: dict[tuple[int, str], tuple[list[int], list[tuple[Tensor, int]]]] = {}
        self._kept: list[Any] = []  # whose ids are keys

    def accepted(self, pair: Pair) -> Accepted:
        """Teacher-forced acceptance of a pair; an OptionError where no prompt fits the context."""
        numbers, texts = self._written(pair)
        depth = min(self.depth, pair.drafter.max_depth or self.depth, self.new_tokens - 1)
        layers = tuple(pair.drafter.config.feature_layers)
        counts: list[np.ndarray] = []
        for first in range(0, len(texts), BATCH):
            written = with_features(pair.target, layers, texts[first : first + BATCH])
            for ranks in measure_ranks(pair.drafter, written, depth):
                whole = ranks[: max(len(ranks) - depth + 1, 1)]
                counts.append((whole == 0).long().cumprod(1).sum(1).numpy())
        prompts = [prompt for _, prompt in texts]
        return Accepted(counts, prompts, numbers, depth, [text for text, _ in texts])

    def sampled(self, pair: Pair, seed: int = 0) -> dict[str, Any]:
        """τ and acceptance by depth of real decoding at temperature 1, and the texts."""
        depth = min(self.depth, pair.drafter.max_depth or self.depth)
        speculator = Speculator(pair.target, pair.drafter, tree=f"chain:{depth}")
        stats, prompts = Stats(depth), self._prompts(pair)[1]
        seeds = row_seeds(seed, len(prompts)).tolist()
        texts: list[tuple[Tensor, int]] = []
        for first in range(0, len(prompts), BATCH):
            rows = prompts[first : first + BATCH]
            ids, mask = (
                pad_sequence(each, batch_first=True, padding_side="left")
                for each in (rows, [torch.ones_like(row) for row in rows])
            )
            longest = ids.shape[1]
            found = speculator.generate(
                ids, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=True,
                temperature=1.0, top_k=0, seed=seeds[first : first + BATCH],
            )  # fmt: skip
            counts = speculator.stats.counts
            ends = longest + 1 + (counts.sum(0) if len(counts) else np.zeros(len(rows), int))
            each = zip(found, rows, ends.tolist(), strict=True)
            texts += [(text[longest - len(row) : end], len(row)) for text, row, end in each]
            stats.extend(speculator.stats)
        if speculator.target.tap is not None:
            speculator.target.tap.close()
        shares = [None if math.isnan(share) else share for share in stats.acceptance_by_depth]
        tau = stats.tau if stats.rounds else None
        return {"tau": tau, "by_depth": shares, "texts": texts}

    def _prompts(self, pair: Pair) -> tuple[list[int], list[Tensor]]:
        """The prompts that leave room for new tokens, and their documents' numbers.

        A text that does not fit is cut, as `bench` cuts it; a chat is left out.
        """
        context, limit = trained_context(pair.target), room_for(pair.target, self.new_tokens)
        cuts = not pair.rendering.as_chats  # a chat's end belongs to its template
        every = [pair.rendering.ids(pair.tokenizer, document) for document in self.documents]
        every = [
            ids[: taken(limit)] if cuts and is_cut(document, len(ids), limit) else ids
            for document, ids in zip(self.documents, every, strict=True)
        ]
        room = len(max(every, key=len)) if limit is None else limit
        kept = [i for i, ids in enumerate(every) if 0 < len(ids) <= room]
        if not kept:
            raise OptionError(
                f"none of {len(every)} prompts leaves room for {self.new_tokens} new tokens in a "
                f"context of {context}; ask for fewer (--new-tokens), or give shorter prompts."
            )
        return kept, [every[i].to(pair.target.device) for i in kept]

    def _written(self, pair: Pair) -> tuple[list[int], list[tuple[Tensor, int]]]:
        key = id(pair.target), repr(pair.rendering)
        if key not in self._texts:
            numbers, prompts = self._prompts(pair)
            texts: list[tuple[Tensor, int]] = []
            with torch.no_grad():
                for first in range(0, len(prompts), BATCH):
                    batch = prompts[first : first + BATCH]
                    texts += continue_texts(pair.target, batch, self.new_tokens)
            long = [i for i, (text, prompt) in enumerate(texts) if len(text) - prompt > 1]
            if not long:
                raise OptionError(
                    "the target ends every answer at once, so nothing can be drafted; give prompts "
                    "that it answers."
                )
            self._texts[key] = [numbers[i] for i in long], [texts[i] for i in long]
            self._kept.append(pair.target)
        return self._texts[key]
