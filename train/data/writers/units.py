"""What every writer is given and gives: units of work, and rows with counts of what became of them.

A unit is one document of the corpus, or one prefix; its number seeds its noise and says which shard
it belongs to, so a row is the same whichever process writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headstart.heads.core import counted

from ...recipe import Distill
from ..rendering import Rendered
from ..training_rows import Row


@dataclass
class Counts:
    """What became of the units of a shard, or of several.

    Attributes:
        kept: units that gave a row; cut: those among them whose last turns did not fit; truncated:
            those whose answer ends where the row does; split: texts that took several rows.
        too_long: left out, since no answer that is taught fits; empty: left out without an answer,
            or ended before a question that a server answered with nothing.
        unfinished: chats that ended with an answer of `distill.new_tokens` without its end.
        refused: chats that the chat template or the server refused, as a whole or at a later
            question.
        rows: training rows; tokens: of all rows; supervised: those that are trained on.
        answers: in the rows; openings: those among them whose first token is supervised, and the
            one after it, which is the first that a drafter drafts.
        near_ties: tokens written that one forward over the row puts second, by rounding alone.
    """

    kept: int = 0
    cut: int = 0
    truncated: int = 0
    split: int = 0
    too_long: int = 0
    empty: int = 0
    unfinished: int = 0
    refused: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    answers: int = 0
    openings: int = 0
    near_ties: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: n + getattr(other, name) for name, n in vars(self).items()})

    def known(self) -> dict[str, int]:
        """Those that are not 0, and always `rows`, `tokens` and `supervised`."""
        always = {"rows", "tokens", "supervised"}
        return {name: n for name, n in asdict(self).items() if n or name in always}

    def left_out(self, spec: Distill) -> Iterator[str]:
        """A line for each kind of text that was left out or cut."""
        if self.too_long:
            first = (
                f"distill.prefix_tokens {spec.prefix_tokens} or " if spec.writer != "given" else ""
            )
            yield f"{counted(self.too_long, 'text')} left out: longer than {first}max_length"
        if self.cut:
            yield f"{counted(self.cut, 'chat')} cut at a turn, since max_length is reached there"
        if self.truncated:
            yield f"{counted(self.truncated, 'answer')} truncated: longer than max_length allows"
        if self.empty:
            yield f"{counted(self.empty, 'text')} left out: no answer, or an empty prompt or answer"
        if self.unfinished:
            yield (
                f"{counted(self.unfinished, 'chat')} ended early, by an answer of "
                f"distill.new_tokens {spec.new_tokens}"
            )
        if self.refused:
            who = "chat template" + (" or the server" if spec.writer == "openai" else "")
            chats = counted(self.refused, "chat")
            if spec.writer == "given":
                yield f"{chats} left out: refused by the {who}"
            else:
                yield f"{chats} left out or ended early: refused by the {who}"


@dataclass(frozen=True)
class Written:
    """The rows of one unit, and what became of it."""

    rows: list[Row]
    counts: Counts


def written(id: str, rendered: Sequence[Rendered], counts: Counts) -> Written:
    """Rows of a unit, counted, on top of what is in `counts`; `empty` where nothing is taught."""
    supervised = [int(np.count_nonzero(row.supervised)) for row in rendered]
    taught = [row for row, count in zip(rendered, supervised, strict=True) if count]
    rows = [Row(id, row.tokens.astype(np.int32, copy=False), row.supervised) for row in taught]
    answers = [(row, answer) for row in taught for answer in row.answers]
    found = Counts(
        kept=bool(rows),
        empty=not rows and not (counts.too_long or counts.refused or counts.empty),
        rows=len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        supervised=sum(supervised),
        answers=len(answers),
        openings=sum(_opening(row, *answer) for row, answer in answers),
    )
    return Written(rows, counts + found)


def _opening(row: Rendered, first: int, end: int) -> bool:
    """Whether an answer's first two tokens are supervised, or its only one."""
    return all(row.supervised[first : min(first + 2, end)].tolist())


Tick = Callable[[int, int], Any]
"""Called with the numbers of units finished and of tokens written since its last call."""


class Writer(Protocol):
    """Writes the rows of units."""

    units: int
    """How many there are."""
    skipped: int
    """Documents that give no unit, as far as they are known."""

    def choose(self) -> None:
        """Prepare; all processes call it once, before the first `write`."""

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        """The rows of units, in the order of their numbers."""
        ...

    def done(self, numbers: range) -> None:
        """Called when the rows of these units are in a whole shard."""


def order_of(documents: int, seed: int) -> list[int]:
    """The documents in the order in which they are taken."""
    return torch.randperm(documents, generator=torch.Generator().manual_seed(seed)).tolist()
