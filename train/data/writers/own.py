"""The target writes: it answers chats, or continues prefixes of documents, by our own runtime."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstart.heads.core import row_seeds
from headstart.infer import Speculator

from ...recipe import Distill
from ..documents import Document
from ..prefixes import Prompts, Windows
from ..rendering import ChatRenderer, Rendered
from ..training_rows import write_rows
from .replay import Replay
from .units import Counts, Tick, Written, order_of, written


class PrefixWriter:
    """Continues prefixes that are drawn once for all rows, so that row i is always the same."""

    def __init__(
        self,
        speculator: Callable[[], Speculator],
        prefixes: Windows | Prompts,
        spec: Distill,
        examples: int,
        seed: int = 0,
    ):
        self.speculator, self.prefixes, self.spec = speculator, prefixes, spec
        self.units = examples
        # What row i gets does not depend on which shards are missing.
        self._drawn = prefixes.draw(examples, seed)
        self._seeds = row_seeds(seed, examples).tolist()

    def check(self) -> None:
        """Nothing fails for certain."""

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        for first in range(numbers.start, numbers.stop, self.spec.batch_size):
            some = slice(first, min(first + self.spec.batch_size, numbers.stop))
            batch = [self.prefixes[number] for number in self._drawn[some]]
            tokens, lengths, counts = write_rows(
                self.speculator(), batch, self._seeds[some], self.spec
            )
            tick(len(batch), int((lengths - counts).sum()))
            each = zip(tokens.tolist(), lengths.tolist(), counts.tolist(), strict=True)
            for number, (row, length, prompt) in enumerate(each, start=first):
                mask = [at >= prompt for at in range(length)]
                rendered = Rendered(row[:length], mask, [(prompt, length)])
                yield written(f"{self._drawn[number]}", [rendered], Counts())


class ReplayWriter:
    """Answers the chats of documents, turn by turn, see `Replay`; texts are prompts of one turn.

    Args:
        speculator: makes or returns what decodes.
        examples: so many documents are taken, all of them before any comes again.
    """

    def __init__(
        self,
        speculator: Callable[[], Speculator],
        renderer: ChatRenderer,
        documents: Sequence[Document],
        spec: Distill,
        examples: int,
        seed: int = 0,
    ):
        self.speculator, self.renderer, self.spec = speculator, renderer, spec
        self.documents, self.units = documents, examples
        self._order = order_of(len(documents), seed)
        self._seeds = row_seeds(seed, examples).tolist()

    def check(self) -> None:
        """Nothing fails for certain."""

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        speculator = self.speculator()
        eos: Any = speculator.model.generation_config.eos_token_id
        ends = set(torch.as_tensor([] if eos is None else eos).flatten().tolist())
        replays = {
            number: Replay(self._document(number), self.renderer, self.spec, ends)
            for number in numbers
        }
        # Those with most turns first: none of them is then left alone at the end.
        ready = deque(sorted(replays, key=lambda number: -replays[number].turns))
        turns = dict.fromkeys(replays, 0)

        def next_prompt() -> Prompt | None:
            while ready:
                number = ready.popleft()
                asked = replays[number].ask()
                if asked is None:
                    tick(1, 0)
                    continue
                turns[number] += 1
                seed = int(row_seeds(self._seeds[number], turns[number])[-1])
                return Prompt(number, asked.tokens, seed, asked.room)
            return None

        for prompt, answer in answers(speculator, self.spec, next_prompt):
            replays[prompt.number].take(answer)
            tick(0, len(answer))
            ready.appendleft(prompt.number)  # its next turn comes before a new chat
        yield from (replays[number].result() for number in numbers)

    def _document(self, number: int) -> Document:
        return self.documents[self._order[number % len(self._order)]]


@dataclass(frozen=True)
class Prompt:
    """A prompt in the batch that is decoded."""

    number: int  # its unit's
    tokens: list[int]
    seed: int
    room: int  # tokens that the answer may have


def answers(
    speculator: Speculator, spec: Distill, next_prompt: Callable[[], Prompt | None]
) -> Iterator[tuple[Prompt, list[int]]]:
    """Each prompt with its answer, its end token included, as they end."""
    while batch := list(itertools.islice(iter(next_prompt, None), spec.batch_size)):
        rooms = [prompt.room for prompt in batch]
        longest = max(len(prompt.tokens) for prompt in batch)
        shape = replace(spec, prefix_tokens=longest, new_tokens=max(rooms))
        prompts = [torch.tensor(prompt.tokens) for prompt in batch]
        seeds = [prompt.seed for prompt in batch]
        tokens, lengths, counts = write_rows(speculator, prompts, seeds, shape)
        each = zip(batch, tokens.tolist(), lengths.tolist(), counts.tolist(), strict=True)
        for prompt, row, length, first in each:
            yield prompt, row[first : min(length, first + prompt.room)]
