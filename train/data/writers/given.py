"""The writer that writes nothing: chats and texts are trained on as they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..documents import ChatTemplateError, Document
from ..prefixes import DistillError
from ..rendering import ChatRenderer, Rendered
from .units import Counts, Tick, Written, order_of, written

_AT_ONCE = 64  # documents that are tokenised at once


class GivenWriter:
    """Existing answers as training rows, see `given_rows`.

    Args:
        supervise: `all` answers of a chat or the `last` one alone.
        length: tokens of a row at most; None for any.
        examples: how many of the documents are taken.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        documents: Sequence[Document],
        supervise: str,
        length: int | None,
        examples: int,
        seed: int = 0,
    ):
        self.renderer, self.documents = renderer, documents
        self.supervise, self.length, self.skipped = supervise, length, 0
        self.units, self._order = examples, order_of(len(documents), seed)

    def choose(self) -> None:
        """There is nothing to choose."""

    def done(self, numbers: range) -> None:
        """Nothing was kept for them."""

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        for first in range(numbers.start, numbers.stop, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, numbers.stop))
            documents = [self.documents[self._order[number]] for number in some]
            found = given_rows(self.renderer, documents, self.supervise, self.length)
            tick(len(found), sum(each.counts.supervised for each in found))
            yield from found


def given_rows(
    renderer: ChatRenderer, documents: Sequence[Document], supervise: str, length: int | None
) -> list[Written]:
    """The rows of each document: of a chat, its answers; of a prompt, its answer; of a text, all.

    Rows that are too long are cut at a turn, and left out where not one answer fits. Raises
    DistillError, which names the document, where the template refuses a chat.
    """
    chats = [(document.messages, document.tools) for document in documents if document.messages]
    try:
        rendered = iter(renderer.rows_of(chats))
    except ChatTemplateError:
        rendered = iter([_rendered(renderer, d) for d in documents if d.messages])
    found = []
    for document in documents:
        rows = next(rendered) if document.messages else [_text_row(renderer, document)]
        found.append(_fitted(document.id, rows, supervise, length, bool(document.messages)))
    return found


def _rendered(renderer: ChatRenderer, document: Document) -> list[Rendered]:
    """The rows of one chat, whose id an error names."""
    assert document.messages is not None
    try:
        return renderer.rows(document.messages, tools=document.tools)
    except ChatTemplateError as error:
        raise DistillError(
            f"{document.id}: {error}; drop the row, or set distill.chat=plain."
        ) from None


def _text_row(renderer: ChatRenderer, document: Document) -> Rendered:
    """A text, all of which is taught but its first token; or a prompt whose answer is."""
    tokenizer: Any = renderer.tokenizer
    tokens: list[int] = tokenizer(document.text, verbose=False)["input_ids"]
    if document.answer is None:
        return _row(tokens, 1)
    whole: list[int] = tokenizer(document.whole(), verbose=False)["input_ids"]
    if whole[: len(tokens)] != tokens:
        whole = tokens + tokenizer(document.answer, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None and whole[-1] != tokenizer.eos_token_id:
        whole = [*whole, tokenizer.eos_token_id]
    return _row(whole, len(tokens))


def _row(tokens: list[int], first: int) -> Rendered:
    """A row that is taught from token `first` on."""
    ids = np.array(tokens, np.int32)
    return Rendered(ids, np.arange(len(ids)) >= first, [(first, len(ids))])


def _fitted(
    id: str, rows: list[Rendered], supervise: str, length: int | None, turns: bool
) -> Written:
    """Rows cut to `length`: chats between turns, other texts at a token; and what was cut."""
    counts = Counts()
    fitted = []
    for row in rows:
        part = row
        if length is not None and len(row.tokens) > length:
            if turns:
                part = row.cut(length)
            else:
                first = row.answers[0][0]
                keep = [(first, length)] if first < length else []
                part = Rendered(row.tokens[:length], row.supervised[:length], keep)
        if part.answers:
            fitted.append(part)
        if part is not row:
            counts.cut = 1
    if rows and rows[0].answers and not fitted:
        counts = Counts(too_long=1)
    if supervise == "last":
        fitted = [row.last() for row in fitted[-1:]]
    return written(id, fitted, counts)
