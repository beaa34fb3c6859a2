"""The target writes: it answers chats, or continues prefixes of documents, by our own runtime."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headstart.heads.core import end_tokens, row_seeds
from headstart.infer.prompts import Prompt
from headstart.infer.stream import LEFT_OUT, decode_stream

from ...recipe import Distill
from ..documents import Document
from ..prefixes import Prompts, Windows
from ..rendering import ChatRenderer, Rendered
from ..training_rows import write_rows
from .drafting import Drafting
from .replay import Order, Replay
from .units import Counts, Tick, Writer, Written, written

logger = logging.getLogger(__name__)


class PrefixWriter(Writer):
    """Continues prefixes that are drawn once for all rows, so that row i is always the same."""

    def __init__(
        self,
        drafting: Drafting,
        prefixes: Windows | Prompts,
        spec: Distill,
        examples: int,
        seed: int = 0,
    ):
        # All prefixes have `prefix_tokens`, and what is written after them must leave a row of at
        # most `row_tokens`.
        room = min(spec.new_tokens, spec.row_tokens - spec.prefix_tokens)
        self.drafting, self.prefixes = drafting, prefixes
        self.spec = replace(spec, new_tokens=room)
        self.units, self.skipped = examples, prefixes.skipped
        # What row i gets does not depend on which shards are missing.
        self._drawn = prefixes.draw(examples, seed)
        self._seeds = row_seeds(seed, examples).tolist()

    def choose(self) -> None:
        """Choose whether the drafter is used."""
        some = self._drawn[: self.spec.batch_size]
        self.drafting.choose([self.prefixes[number] for number in some])

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        for first in range(numbers.start, numbers.stop, self.spec.batch_size):
            some = slice(first, min(first + self.spec.batch_size, numbers.stop))
            batch = [self.prefixes[number] for number in self._drawn[some]]
            seeds, speculator = self._seeds[some], self.drafting.speculator
            tokens, lengths, counts = write_rows(speculator, batch, seeds, self.spec)
            tick(len(batch), int((lengths - counts).sum()))
            each = zip(tokens.numpy(), lengths.tolist(), counts.tolist(), strict=True)
            for number, (row, length, prompt) in enumerate(each, start=first):
                rendered = Rendered(row[:length], np.arange(length) >= prompt, [(prompt, length)])
                seed = np.full(length, self._seeds[number], np.int64)
                one = written(str(number), [rendered], Counts())
                yield self.drafting.checked(one, [seed] * len(one.rows))


class ReplayWriter(Writer):
    """Answers the chats of documents, turn by turn, see `Replay`; texts are prompts of one turn.

    Args:
        drafting: what decodes.
        examples: so many documents are taken, all of `order` before any comes again.
    """

    def __init__(
        self,
        drafting: Drafting,
        renderer: ChatRenderer,
        documents: Sequence[Document],
        spec: Distill,
        examples: int,
        order: Order,
        seed: int = 0,
    ):
        self.drafting, self.renderer, self.spec = drafting, renderer, spec
        self.documents, self.units = documents, examples
        self._order, self.skipped = order
        config: Any = drafting.model.generation_config
        if left := [name for name in LEFT_OUT if getattr(config, name, None)]:
            logger.warning(
                "distill: answers are written without the %s of the target's generation config, "
                "which `generate` applies, also in validation; drafts fit best where you decode "
                "without it too", " and the ".join(left),
            )  # fmt: skip
        self._ends = end_tokens(drafting.model)
        self._seeds = row_seeds(seed, examples).tolist()

    def choose(self) -> None:
        """Choose whether the drafter is used."""
        if self.spec.drafter is None:
            return
        asked = [self._replay(number).ask() for number in range(min(self.units, 256))]
        prompts = [torch.tensor(each.tokens) for each in asked if each is not None]
        if prompts:
            self.drafting.choose(prompts)

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        replays = {number: self._replay(number) for number in numbers}
        # Those with most turns first: none of them is then left alone at the end.
        ready = deque(sorted(replays, key=lambda number: -replays[number].turns))
        turns: dict[int, list[int]] = {number: [] for number in numbers}  # the seeds of each

        def next_prompt() -> Prompt | None:
            while ready:
                number = ready.popleft()
                asked = replays[number].ask()
                if asked is None:
                    tick(1, 0)
                    continue
                seed = int(row_seeds(self._seeds[number], len(turns[number]) + 1)[-1])
                turns[number].append(seed)
                return Prompt(number, asked.tokens, asked.room, seed)
            return None

        spec = self.spec
        found = decode_stream(
            self.drafting.speculator, next_prompt, spec.batch_size, spec.row_tokens,
            spec.temperature,
        )  # fmt: skip
        for prompt, answer in found:
            replays[prompt.key].take(answer)
            tick(0, len(answer))
            ready.appendleft(prompt.key)  # its next turn comes before a new chat
        for number in numbers:
            replay = replays[number]
            yield self.drafting.checked(replay.result(), _seeds(replay.rows, turns[number]))

    def _replay(self, number: int) -> Replay:
        document = self.documents[self._order[number % len(self._order)]]
        return Replay(document, self.renderer, self.spec, self._ends)


def _seeds(rows: Sequence[Rendered], turns: Sequence[int]) -> list[np.ndarray]:
    """For each token of the rows that have something supervised the seed of its answer."""
    left, found = iter(turns), []
    for row in rows:
        seeds = np.zeros(len(row.tokens), np.int64)
        for first, end in row.answers:
            seeds[first:end] = next(left)
        if row.supervised.any():
            found.append(seeds)
    return found
