"""Where a text is shown as it is written: a terminal, a notebook, or any other stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from headstart.terminal import visible
from headstart.train.figures.pieces import Piece

from .drafted_text import DraftedText, colour
from .figures import Figures

_PAUSE = 1 / 12  # seconds between two drawings, so that drawing takes little of the time


class View(Protocol):
    """Shows pieces as they come, and the figures."""

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None: ...

    def close(self, figures: Figures) -> None: ...


class StreamView:
    """Writes the text alone, as it is; to a terminal without its control characters."""

    def __init__(self, out: TextIO):
        self._out, self._terminal = out, out.isatty()
        self._open = False

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        text = "".join(piece.text for piece in pieces)
        if text:
            self._out.write(visible(text) if self._terminal else text)
            self._out.flush()
            self._open = True

    def close(self, figures: Figures) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()
        self._open = False


class TerminalView:
    """Writes the text in colours, and below it a line of figures and one of acceptance by depth.

    Rows of the text that can no longer change are printed for good. Only the last row and the
    figures are drawn again and again, so the text may be longer than the screen.

    Args:
        before: what the text continues, on its first row.
    """

    def __init__(self, console: Console, before: str = ""):
        self._console, self._colours = console, not console.no_color
        self._row = Text().append(visible(before), "dim")  # the last row, which may still grow
        self._live: Live | None = None
        self._drawn = 0.0

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        for piece in pieces:
            self._row.append(visible(piece.text), self._style(piece))
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        if time.perf_counter() - self._drawn >= _PAUSE:
            self._draw(figures)

    def close(self, figures: Figures) -> None:
        if self._live is not None:
            try:
                self._draw(figures)
            finally:
                self._live.stop()
        self._live, self._row = None, Text()

    def _style(self, piece: Piece) -> str:
        if not piece.depth or piece.text.isspace():
            return ""
        return colour(piece.depth) if self._colours else "underline"

    def _draw(self, figures: Figures) -> None:
        assert self._live is not None
        console = self._console
        done: list[Text] = []
        for line in self._row.split("\n", allow_blank=True):
            line.expand_tabs(8)
            done += line.wrap(console, console.width, overflow="fold") if line else [line]
        *done, self._row = done
        below = Group(
            self._row,
            Rule(style="dim"),
            Text(figures.line(), "bold"),
            figures.legend(console.width, self._colours),
        )
        self._live.update(below, refresh=True)  # first: printing draws again what was drawn last
        if done:
            console.print(Text("\n").join(done), overflow="fold")
        self._drawn = time.perf_counter()


class NotebookView:
    """Shows the text in a notebook's output, in place."""

    def __init__(self) -> None:
        self._text, self._handle, self._drawn = DraftedText(), None, 0.0

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        self._text.pieces += pieces
        if time.perf_counter() - self._drawn >= 3 * _PAUSE:
            self._draw(figures)

    def close(self, figures: Figures) -> None:
        if self._text.pieces:
            self._draw(figures)

    def _draw(self, figures: Figures) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        page = HTML(f"{self._text.to_html()}<div><b>{figures.line()}</b></div>")
        if self._handle is None:
            self._handle: Any = display(page, display_id=True)
        else:
            self._handle.update(page)
        self._drawn = time.perf_counter()


def in_notebook() -> bool:
    """Whether this runs in a notebook's kernel."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def view_for(out: TextIO, coloured: bool = True, before: str = "") -> View:
    """The view that suits a stream: colours on a terminal that has them, plain text elsewhere.

    Args:
        before: see `TerminalView`.
    """
    if coloured and out is sys.stdout and in_notebook():
        return NotebookView()
    if coloured and out.isatty():
        console = Console(file=out, markup=False, emoji=False, highlight=False)
        if not console.is_dumb_terminal:
            return TerminalView(console, before)
    return StreamView(out)
