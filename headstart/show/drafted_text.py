"""A text in pieces, coloured by the depth at which each was drafted."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from headstart.terminal import visible
from headstart.train.figures.pieces import Piece, PieceReader
from headstart.train.figures.report.drawings import depth_color as colour


@dataclass
class DraftedText:
    """A text with the depth of each of its pieces; notebooks show it in colours.

    >>> text = DraftedText([Piece("def", 0), Piece(" f", 1), Piece("():", 2)])
    >>> str(text), text.drafted, text.tokens
    ('def f():', 2, 3)
    """

    pieces: list[Piece] = field(default_factory=list)

    @classmethod
    def of(cls, tokenizer: Any, ids: Iterable[int], depths: Iterable[int]) -> Self:
        """The text of new tokens and their depths, such as a row of `stats.drafted.depths`.

        A depth below 0, padding behind a row's end, leaves its token out.
        """
        reader = PieceReader(tokenizer)
        pairs = [pair for pair in zip(ids, depths, strict=True) if pair[1] >= 0]
        pieces = reader.add(*map(list, zip(*pairs, strict=True))) if pairs else []
        return cls(pieces + reader.end())

    def __str__(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens that have a text."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def drafted(self) -> int:
        """Those of them that were drafted."""
        return sum(piece.tokens for piece in self.pieces if piece.depth)

    def to_html(self) -> str:
        """A block of HTML by itself: the text, and below it which colour stands for which depth."""
        body, deepest = [], 0
        for depth, run in itertools.groupby(self.pieces, key=lambda piece: piece.depth):
            deepest = max(deepest, depth)
            body += [_span(visible(piece.text), depth) for piece in run]
        legend = " ".join(_span(f" {depth} ", depth) for depth in range(1, deepest + 1))
        said = f"drafted at depth {legend}; without colour: the target’s own" if legend else ""
        return (
            '<div style="font-family:monospace"><div style="white-space:pre-wrap">'
            f'{"".join(body)}</div><div style="opacity:0.7;margin-top:0.5em">{said}</div></div>'
        )

    def _repr_html_(self) -> str:
        return self.to_html()


def _span(text: str, depth: int) -> str:
    text = html.escape(text)
    if not depth:
        return text
    # A tint, so that the letters keep the page's colour, dark or light.
    style = f"background:{colour(depth)}55;border-radius:2px"
    return f'<span style="{style}" title="drafted at depth {depth}">{text}</span>'
