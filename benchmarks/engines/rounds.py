"""How many tokens each round of a text wrote, and where two decoders of it agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Decoded(NamedTuple):
    """A text, and how many tokens each round added to it.

    Attributes:
        judged: of each round the accepted drafts and one more, where these are not what it added.
    """

    text: str
    rounds: list[int]
    judged: list[int] | None = None


class Agreement(NamedTuple):
    """Of two decoders' rounds that start at the same token, those that accept as many drafts."""

    equal: int
    compared: int


def agreement(
    ours: Sequence[int], theirs: Sequence[int], tokens: int, judged: Sequence[int] | None = None
) -> Agreement:
    """Compare the rounds of one text of so many tokens; of theirs what is `judged`, see `Decoded`.

    The first token is left out, which a decoder writes with or without drafts, and so are rounds
    that the end of the text may have cut short.

    >>> agreement([1, 4, 4, 1, 2], [3, 2, 4, 1, 3], 13)
    Agreement(equal=2, compared=2)
    """
    mine = dict(zip(_starts(ours), ours, strict=True))
    other = dict(zip(_starts(theirs), judged or theirs, strict=True))
    longest = max((*ours, *theirs))
    both = [at for at in mine if at in other and 0 < at <= tokens - longest]
    return Agreement(sum(mine[at] == other[at] for at in both), len(both))


def until(rounds: Sequence[int], tokens: int) -> list[int]:
    """The rounds that begin before a text has so many tokens.

    >>> until([1, 4, 4, 4], 9)
    [1, 4, 4]
    """
    starts = _starts(rounds)
    return [count for start, count in zip(starts, rounds, strict=True) if start < tokens]


def _starts(rounds: Sequence[int]) -> list[int]:
    """How long the text is where each round begins."""
    return [0, *accumulate(rounds[:-1])] if rounds else []


def tau(texts: Iterable[Decoded]) -> float:
    """Tokens a round, without each text's first forward and its last round."""
    inner = [count for text in texts for count in text.rounds[1:-1]]
    return sum(inner) / len(inner) if inner else float("nan")
