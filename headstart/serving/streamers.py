"""What an answer is handed to as it is written, round by round."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers.cli.serving.utils import ReasoningText, response_events_to_chunks

from headstart.infer import RoundStreamer
from headstart.infer.streamer import Left
from headstart.train.figures.pieces import Piece, PieceReader

from .probabilities import Log, Told
from .reading import Reader
from .stops import UntilStop

if TYPE_CHECKING:
    from headstart.infer import Emitted

_SPACE = " \t\r\n"


class Text(str):
    """A piece of an answer, with the tokens whose probabilities are told with it."""

    told: Sequence[Told] = ()


class Thought(ReasoningText):
    """A piece of the thoughts before an answer, likewise."""

    told: Sequence[Told] = ()


class Cut(RoundStreamer):
    """Hands on what stands before the first stop string, in the text or in the thoughts before.

    What a round wrote is handed on at once, since each piece costs the server as much. A chat's
    text and thoughts are without the space around them, which stands between marks of a template.

    Args:
        say: takes each piece: a text, a thought, or a call of a tool.
        left: ends the answer once it is set, as nobody waits for it any longer.
        reader: tells text from thoughts and calls; without one all is text.
        log: where probabilities are asked for; of_text: whether they are those of the text alone.
        prompt: of the answer, if its text goes on from it.
        ends: the tokens that end an answer, and are no part of it, nor of thoughts that they end.

    """

    def __init__(
        self,
        tokenizer: Any,
        say: Callable[[Any], None],
        left: threading.Event,
        reader: Reader | None = None,
        stops: Sequence[str] = (),
        log: Log | None = None,
        prompt: Sequence[int] = (),
        of_text: bool = False,
        ends: Collection[int] = (),
    ):
        self._texts = PieceReader(tokenizer, prompt, special=reader is not None)
        self._say, self._left, self._reader, self._log = say, left, reader, log
        self._until, self._kind, self._round = UntilStop(stops), str, list[Any]()
        self._of_text, self._ends = of_text and reader is not None, ends
        self._begun, self._space = set[type](), ""  # kinds; what the last text may end with
        self._first, self._starts, self._length = True, list[int](), 0
        if reader is not None:  # what the prompt has begun of the answer
            self._take(reader.initial_events)
            reader.initial_events = []

    @property
    def total_tokens(self) -> int:
        """Of the answer so far."""
        return len(self._starts)

    @property
    def thought_tokens(self) -> int:
        """Those of them that begin in thoughts, whose marks are none."""
        return sum(map(self._reader.is_thought, self._starts)) if self._reader else 0

    def left(self) -> bool:
        return self._left.is_set()

    def put(self, value: Any) -> None:
        if self._left.is_set():
            raise Left
        if self._first:  # the prompt
            self._first = False
            return
        self._write(value.tolist())
        self._end_round()

    def put_round(self, emitted: Emitted) -> None:
        if self._left.is_set():
            raise Left
        texts = self._write(emitted.tokens[0, : emitted.count[0]].tolist())
        if self._log is not None:
            self._log.add(emitted, texts)
        self._end_round()

    def end(self) -> None:
        self._read(_joined(self._texts.end()))
        if self._reader is not None:
            self._take(self._reader.finalize()[1])
        self._add(self._until.end())
        self._end_round()
        if self._log is not None and (told := self._kept(self._log.end())):
            self._say(_with(told, ""))

    def cancel(self) -> None:
        """End the answer with the round that is decoded now."""
        self._left.set()

    def _write(self, ids: list[int]) -> list[str]:
        """Take tokens; the text that each of them makes whole."""
        texts = [
            "" if token in self._ends else _joined(self._texts.add([token], [0])) for token in ids
        ]
        for text in texts:
            self._starts.append(self._length)
            self._length += len(text)
        self._read("".join(texts))
        return texts

    def _read(self, text: str) -> None:
        if self._reader is None:
            self._enqueue(text)
        elif text:
            self._take(self._reader.feed(text))

    def _take(self, events: list[dict[str, Any]]) -> None:
        for item in response_events_to_chunks(events):
            self._enqueue(item)

    def _enqueue(self, item: Any) -> None:
        kind = type(item)
        if kind is not self._kind:
            self._add(self._until.end())
            self._space = ""
        if not isinstance(item, str):  # a call of a tool
            self._round.append(item)
            return
        self._kind = ReasoningText if isinstance(item, ReasoningText) else str
        self._add(self._until.add(item))

    def _add(self, text: str) -> None:
        if self._reader is not None:
            text = self._space + text if self._kind in self._begun else text.lstrip(_SPACE)
            self._space = text[len(text.rstrip(_SPACE)) :]
            text = text.rstrip(_SPACE)
        if not text:
            return
        self._begun.add(self._kind)
        if self._round and type(self._round[-1]) is self._kind:
            text = self._round.pop() + text
        self._round.append(self._kind(text))

    def _end_round(self) -> None:
        kinds = (str,) if self._of_text else (str, ReasoningText)
        texts = [at for at, item in enumerate(self._round) if type(item) in kinds]
        if self._log is not None and texts:
            reader = self._reader if self._of_text else None
            told = self._kept(self._log.take(math.inf if reader is None else reader.position))
            if told:
                self._round[texts[-1]] = _with(told, self._round[texts[-1]])
        for item in self._round:
            self._say(item)
        self._round.clear()

    def _kept(self, told: list[Told]) -> list[Told]:
        """Those of tokens that are to be told of."""
        if self._reader is None or not self._of_text:
            return told
        return [each for each in told if self._reader.is_text(each.start)]


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _with(told: Sequence[Told], piece: str) -> str:
    """A piece of an answer or of its thoughts, with tokens whose text it has."""
    found = (Thought if isinstance(piece, ReasoningText) else Text)(piece)
    found.told = told
    return found
