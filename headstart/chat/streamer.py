"""The streamer of an answer: it can be stopped, and may end at a text."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headstart.infer import Emitted
from headstart.show import ShowStreamer
from headstart.train.figures.pieces import Piece


class Stopped(Exception):
    """An answer has ended before its end token: the user stopped it, or it came to its text."""


class ChatStreamer(ShowStreamer):
    """Shows an answer; raises `Stopped` between two rounds.

    Args:
        stop: asked after each round, whether the user has stopped the answer.
        end: a text at which the answer ends; neither shown nor part of `text`.

    Attributes:
        ended: whether the answer came to that text.
        answer_ids: its tokens up to the one that completed the text.
    """

    def __init__(self, tokenizer: Any, stop: Callable[[], bool], end: str | None, **shown: Any):
        super().__init__(tokenizer, **shown)
        self._stop, self._end, self.ended = stop, end, False
        self._held: list[Piece] = []  # which may be the beginning of the end
        self._read = 0  # tokens

    def put_round(self, emitted: Emitted) -> None:
        super().put_round(emitted)
        if self.ended or self._stop():
            raise Stopped

    @property
    def answer_ids(self) -> list[int]:
        return self.ids[: self._read] if self.ended else self.ids

    def _show(self, pieces: list[Piece]) -> None:
        if self._end is None:
            super()._show(pieces)
            return
        for piece in pieces:
            if self.ended:
                return
            self._read += piece.tokens
            self._held.append(piece)
            self._pass_on(self._end)

    def _finish(self) -> None:
        held, self._held = self._held, []
        if not self.ended:
            super()._show(held)

    def _pass_on(self, end: str) -> None:
        """Show what is held back, but for what may yet become the end."""
        text = "".join(piece.text for piece in self._held)
        place = text.find(end)
        if place < 0:
            most = min(len(end) - 1, len(text))
            tail = next((n for n in range(most, 0, -1) if end.startswith(text[-n:])), 0)
            place = len(text) - tail
        else:
            self.ended = True
        shown: list[Piece] = []
        while self._held and place > 0:
            piece = self._held.pop(0)
            shown.append(Piece(piece.text[:place], piece.depth, piece.tokens))
            if place < len(piece.text):
                self._held.insert(0, Piece(piece.text[place:], piece.depth, 0))
            place -= len(piece.text)
        super()._show(shown)


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed within; pressed again, it interrupts at once, as ever."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def note(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
