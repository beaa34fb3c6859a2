"""Streamers that are told who wrote each token."""

from abc import abstractmethod
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from headstart.heads import OptionError
from headstart.heads.core.errors import brief

from .stats import Emitted


class Left(Exception):
    """Ends a request whose text nobody waits for any longer."""


class RoundStreamer(BaseStreamer):
    """A streamer of transformers that is given whole rounds, with the depth of each token.

    `speculator.generate(…, streamer=…)` calls `put` with the prompt's ids [1, P], `put_round` with
    the first token, which the prefill gives, and then with what each round emits, and `end`.
    """

    @abstractmethod
    def put_round(self, emitted: Emitted) -> None:
        """Take what one row emitted: `count[0]` of `tokens[0]`, with their `depths[0]`."""

    def left(self) -> bool:
        """Whether nobody waits for the text any longer. A batcher asks before a request's turn,
        which then ends with `Left`."""
        return False

    def put(self, value: Any) -> None:
        """Take the prompt's ids."""

    def end(self) -> None:
        """Take note that the request has ended."""


def check_streamer(streamer: Any) -> None:
    """Refuse, by an `OptionError`, what has no `put` and `end`, such as a class in place of one."""
    methods = (getattr(streamer, name, None) for name in ("put", "end"))
    if streamer is not None and (isinstance(streamer, type) or not all(map(callable, methods))):
        raise OptionError(
            f"streamer is {brief(repr(streamer))}; expected an object with put and end, such as "
            "TextStreamer(tokenizer)."
        )


def hand_on(streamer: BaseStreamer | None, emitted: Emitted) -> None:
    """Give a streamer, where there is one, what a round emitted for a single row."""
    if isinstance(streamer, RoundStreamer):
        streamer.put_round(emitted)
    elif streamer is not None:
        streamer.put(torch.from_numpy(emitted.tokens[0, : emitted.count[0]]))
