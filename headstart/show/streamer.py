"""A streamer that shows a text as it is written, coloured by who wrote it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from headstart.infer import Emitted, RoundStreamer
from headstart.train.figures.pieces import Piece, PieceReader

from .drafted_text import DraftedText
from .figures import Figures
from .views import StreamView, View, view_for


class ShowStreamer(RoundStreamer):
    """Shows accepted draft tokens coloured by depth, the target's own plain, and the figures.

    On a terminal below the text, in a notebook in its output; anywhere else it writes the text
    alone. NO_COLOR is respected: drafted tokens are then underlined.

        streamer = ShowStreamer(speculator.tokenizer)
        speculator.generate(**inputs, max_new_tokens=128, streamer=streamer)
        streamer.text    # to look at again; notebooks show it in colours

    As a context manager it also leaves the terminal in order after an exception.

    Args:
        out: stdout when None.
        coloured: False writes the text alone, everywhere.
        before: what the text continues, shown in front of it on a terminal with colours.
        prompt: its last tokens, or all, so that a space between both is not left out.
        view: in place of what suits `out`.

    Attributes:
        text, ids, figures: of what was written so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        out: TextIO | None = None,
        coloured: bool = True,
        before: str = "",
        prompt: Sequence[int] = (),
        view: View | None = None,
    ):
        self.text, self.ids, self.figures = DraftedText(), list[int](), Figures()
        self._reader = PieceReader(tokenizer, prompt)
        self._view = view or view_for(out or sys.stdout, coloured, before)

    @property
    def shows_figures(self) -> bool:
        """Whether the figures are shown with the text."""
        return not isinstance(self._view, StreamView)

    def put_round(self, emitted: Emitted) -> None:
        count = int(emitted.count[0])
        ids = emitted.tokens[0, :count].tolist()
        self.ids += ids
        self.figures.add(emitted)
        self._show(self._reader.add(ids, emitted.depths[0, :count].tolist()))

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        """Show what was held back, and leave the terminal in order; again has no effect."""
        self._show(self._reader.end())
        self._finish()
        self._view.close(self.figures)

    def _finish(self) -> None:
        """Show what else was held back."""

    def _show(self, pieces: list[Piece]) -> None:
        self.text.pieces += pieces
        if pieces:
            self._view.show(pieces, self.figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()
