"""Stop strings, which end an answer and are no part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

_BESIDE = 8  # tokens without a text that may stand between those of a stop string


class UntilStop:
    """The part of a text that stands before the first stop string, given piece by piece.

    The end of a piece that may be the beginning of a stop string is held back until the next one.

    >>> text = UntilStop(["END"])
    >>> [text.add(piece) for piece in ("one E", "lse, two EN", "D, three")]
    ['one ', 'Else, two ', '']
    >>> text.end()
    ''

    Args:
        stops: none of them empty.

    Attributes:
        met: whether a stop string was there.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.met = tuple(stops), "", False

    def add(self, piece: str) -> str:
        """What of the text so far can be said now, and was not said before."""
        if self.met:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.met = bool(found)
        said = min(found) if found else len(text) - self._may_begin(text)
        self._held = "" if found else text[said:]
        return text[:said]

    def end(self) -> str:
        """What was held back, when no more of the text follows."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """How many of the last characters begin a stop string, at most."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


class AtStop(StoppingCriteria):
    """Holds once an answer's text has a stop string; the prompt's text never counts.

    `StopStringCriteria` of transformers looks through the whole vocabulary for each new request,
    which takes seconds, and counts the prompt. This one reads the text of the last tokens.

    Args:
        stops: none of them empty, at least one.
        prompt: tokens before the answer.
        before: the last of these, whose text the answer continues, see `context_of`.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int, before: Sequence[int]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._prompt, self._before = prompt, list(before)
        self._last = max(len(stop.encode()) for stop in stops) + _BESIDE

    def __call__(self, input_ids: Tensor, scores: Any, **given: Any) -> Tensor:  # type: ignore[override]
        first = max(self._prompt, input_ids.shape[1] - self._last)
        before = self._before if first == self._prompt else []
        found = [self._in_text(before, row) for row in input_ids[:, first:].tolist()]
        return torch.tensor(found, device=input_ids.device)

    def _in_text(self, before: list[int], ids: list[int]) -> bool:
        text = self._text([*before, *ids])[len(self._text(before)) :]
        return any(stop in text for stop in self._stops)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
