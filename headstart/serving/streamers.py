"""What an answer is handed to as it is written, round by round."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    DirectStreamer,
    ReasoningText,
    _GenerationCancelled,
    response_events_to_chunks,
)

from headstart.infer import RoundStreamer

from .probabilities import Log, Told
from .stops import UntilStop

if TYPE_CHECKING:
    from headstart.infer import Emitted

Left = _GenerationCancelled
"""The error that ends an answer whose client has left."""


class UntilLeft(RoundStreamer):
    """Ends an answer that nobody waits for any longer; a log takes what is written meanwhile."""

    def __init__(self, left: threading.Event, log: Log | None):
        self._left, self._log = left, log

    def put(self, value: Any) -> None:
        if self._left.is_set():
            raise Left

    def put_round(self, emitted: Emitted) -> None:
        self.put(None)
        if self._log is not None:
            self._log.add(emitted)


class Text(str):
    """A piece of an answer, with the tokens whose probabilities are told with it."""

    told: Sequence[Told] = ()


class Thought(ReasoningText):
    """A piece of the thoughts before an answer, likewise."""

    told: Sequence[Told] = ()


class Cut(DirectStreamer, RoundStreamer):
    """Hands on what stands before the first stop string, in the text or in the thoughts before.

    What a round wrote is handed on at once, since each piece costs the server as much. That an
    answer has ended, its manager says.

    Args:
        log: where probabilities are asked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        loop: Any,
        pieces: Any,
        parser: Any,
        stops: Any,
        log: Log | None = None,
    ):
        self._until, self._kind, self._round = UntilStop(stops), str, list[Any]()
        self._log, self._begun = log, set[type]()
        first = []
        if parser is not None:  # what the prompt has begun of the answer
            first, parser.initial_events = response_events_to_chunks(parser.initial_events), []
        super().__init__(tokenizer, loop, pieces, response_parser=parser)
        for item in first:
            self._enqueue(item)

    def continue_after(self, context: list[int]) -> None:
        """Write what follows the text of these tokens; see `context_of`."""
        if context:
            self._decode_stream = DecodeStream(context, skip_special_tokens=self._parser is None)

    def put(self, value: Any) -> None:
        super().put(value)
        self._end_round()

    def put_round(self, emitted: Emitted) -> None:
        if self._log is not None:
            self._log.add(emitted)
        self.put(torch.from_numpy(emitted.tokens[0, : emitted.count[0]]))

    def end(self) -> None:
        super().end()
        self._end_round()
        if self._log is not None and (told := self._log.end()):
            super()._enqueue(_with(told, ""))

    def _enqueue(self, item: Any) -> None:
        if not isinstance(item, str) or type(item) is not self._kind:
            self._add(self._until.end())
        if item is None:
            return
        if not isinstance(item, str):  # a call of a tool
            self._round.append(item)
            return
        self._kind = ReasoningText if isinstance(item, ReasoningText) else str
        if self._parser is not None and self._kind not in self._begun:
            item = item.lstrip()  # between marks of a template there are line ends
        if item:
            self._begun.add(self._kind)
        self._add(self._until.add(item))

    def _add(self, text: str) -> None:
        if text and self._round and type(self._round[-1]) is self._kind:
            text = self._round.pop() + text
        if text:
            self._round.append(self._kind(text))

    def _end_round(self) -> None:
        last = self._round[-1] if self._round else None
        if self._log is not None and isinstance(last, str) and (told := self._log.take()):
            self._round[-1] = _with(told, last)
        for item in self._round:
            super()._enqueue(item)
        self._round.clear()


def _with(told: Sequence[Told], piece: str) -> str:
    """A piece of an answer or of its thoughts, with tokens whose text it has."""
    found = (Thought if isinstance(piece, ReasoningText) else Text)(piece)
    found.told = told
    return found
