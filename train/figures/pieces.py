"""From tokens to pieces of text: whole characters, each with the depth at which it was drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character yet
_LONGEST = 4  # bytes of a character in UTF-8, and so tokens at most
_CONTEXT = 8  # tokens of a prompt that decide how the first ones after it are written


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token wrote, or several where a character spans them.

    Attributes:
        depth: at which it was drafted; 0 where the target wrote it, or one of its tokens.
        tokens: how many.
    """

    text: str
    depth: int
    tokens: int = 1


def text_of(tokenizer: Any, ids: Sequence[int], special: bool = False) -> str:
    """Tokens as a text, in which special ones are left out, unless they are asked for."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


def context_of(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that a text goes on from; none where they end in half a
    character.

    Without them the decoders of SentencePiece leave out the space that a text begins with.
    """
    last = list(prompt[-_CONTEXT:])
    return [] if text_of(tokenizer, last).endswith(_UNFINISHED) else last


class PieceReader:
    """Turns tokens into pieces as they come; joined, they are `tokenizer.decode` of all of them.

    (But for bytes that are no text, which some tokenizers judge only once they know what follows.)
    A character that several tokens spell is held back until it is whole, so that no replacement
    character is shown and taken back.

    Args:
        prompt: the tokens before; joined, the pieces are then what follows its text.
        special: whether special tokens have a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._before = context_of(tokenizer, prompt)  # decide how the next ones are written
        self._text_before = self._decode(self._before)
        self._waiting: list[int] = []
        self._depths: list[int] = []

    def add(self, ids: Iterable[int], depths: Iterable[int]) -> list[Piece]:
        """The pieces that these tokens, with their depths, make whole."""
        found = []
        for token, depth in zip(ids, depths, strict=True):
            self._waiting.append(token)
            self._depths.append(depth)
            count = len(self._waiting)
            if not (text := self._text(count)).endswith(_UNFINISHED):
                found += self._take(count, text)
            elif count > _LONGEST:  # the first of them are no character, and never will be
                first = count - _LONGEST + 1
                found += self._take(first, self._text(first))
        return found

    def end(self) -> list[Piece]:
        """What is still held back, as it stands."""
        count = len(self._waiting)
        return self._take(count, self._text(count)) if count else []

    def _decode(self, ids: list[int]) -> str:
        return text_of(self._tokenizer, ids, self._special)

    def _text(self, count: int) -> str:
        """What the first waiting tokens add to those before; alone they may look otherwise."""
        whole = self._decode(self._before + self._waiting[:count])
        return whole[len(self._text_before) :]

    def _take(self, count: int, text: str) -> list[Piece]:
        """The piece of the first `count` waiting tokens, of that text; none without a text."""
        taken, depths = self._waiting[:count], self._depths[:count]
        self._before = taken if text else self._before + taken
        self._text_before = self._decode(self._before)
        self._waiting, self._depths = self._waiting[count:], self._depths[count:]
        return [Piece(text, max(depths) if min(depths) else 0, count)] if text else []
