"""What continuous batching is given, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import LogitsProcessorList

from headstart.heads.core import RowSettings

from .stats import Emitted


@dataclass(frozen=True)
class Prompt:
    """A prompt of a stream.

    Attributes:
        key: the caller's own.
        tokens: [P] ids.
        new_tokens: at most so many are written.
        seed: of its noise, where it is sampled.
        settings: how it is sampled, in a stream whose prompts differ in that.
        logprobs: see `Request.logprobs`.
    """

    key: Any
    tokens: Sequence[int]
    new_tokens: int
    seed: int = 0
    settings: RowSettings = RowSettings()  # noqa: RUF009 - a tuple
    logprobs: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the prompt and its text, at most."""
        return len(self.tokens) + self.new_tokens


@dataclass(frozen=True)
class Manner:
    """How the prompts of a stream are decoded.

    Attributes:
        eos: token ids that end a text.
        temperature: for which the tree is chosen; 0 is greedy decoding.
        processors: without `Sampling.readers`, the temperature's among them; None where each prompt
            has `settings` of its own. The tree is then for their mean temperature.
    """

    eos: tuple[int, ...]
    temperature: float = 0.0
    processors: LogitsProcessorList | None = None


class Piece(NamedTuple):
    """What a round wrote of one prompt's text, or the error that ended this prompt alone."""

    prompt: Prompt
    emitted: Emitted | None  # of one row
    text: list[int]  # all so far, without the prompt
    ended: bool
    error: Exception | None = None
    kept_tokens: int = 0  # of the prompt, see `Stats`
