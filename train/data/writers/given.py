"""The writer that writes nothing: chats and texts are trained on as they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...recipe import Distill
from ..documents import Document, each_in_time, in_groups
from ..prefixes import DistillError, leave_out
from ..rendering import ChatRenderer, Rendered, Turn, begins
from ..tokenising import Text
from .units import Counts, Tick, Writer, Written, order_of, written

_AT_ONCE = 1 << 20  # characters that are rendered and tokenised at once, more or less


class GivenWriter(Writer):
    """Existing answers as training rows, see `given_rows`.

    Args:
        length: tokens of a row at most; None for any.
        examples: how many of the documents are taken.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        documents: Sequence[Document],
        spec: Distill,
        length: int | None,
        examples: int,
        seed: int = 0,
    ):
        self.renderer, self.documents = renderer, documents
        self.spec, self.length, self.skipped = spec, length, 0
        self.units, self._order = examples, order_of(len(documents), seed)

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        documents = (self.documents[self._order[number]] for number in numbers)
        for found in given_rows(self.renderer, documents, self.spec, self.length):
            tick(len(found), sum(each.counts.supervised for each in found))
            yield from found


def given_rows(
    renderer: ChatRenderer, documents: Iterable[Document], spec: Distill, length: int | None
) -> Iterator[list[Written]]:
    """The rows of each document, of several at once.

    They are of a chat its answers, of a prompt its answer, of a text all; where the tokens of the
    last answer are known, that answer alone. What has no answer gives none. A text makes as many
    rows of `length` tokens as it takes. Chats that are longer are cut at a turn. Where no answer
    fits, or the last one alone is taught and does not, they are left out or truncated, as
    `spec.too_long` says; answers to prompts are truncated. Raises DistillError, which names the
    document, where the template refuses a chat, or its tokens are not the tokenizer's.
    """

    def tokenised(given: list[_Texts]) -> tuple[list[_Texts], Iterator[np.ndarray]]:
        return given, iter(renderer.encoder([text for each in given for text in each.texts]))

    together = in_groups(_texts(renderer, documents), lambda each: each.size, _AT_ONCE)
    for given, ids in renderer.encoder.ahead(tokenised, together):
        found = []
        for each in given:
            document = each.document
            if each.turns is None:
                made = written(document.id, [], Counts(refused=1))
            elif document.ids is not None:
                made = _fitted(document.id, [_decoded(renderer, document)], length, True)
            elif document.messages:
                rows = renderer.rows_from(each.turns, ids)
                if renderer.chat.supervise == "last":
                    rows = [row.last() for row in rows[-1:]]
                made = _fitted(document.id, rows, length, spec.too_long == "truncate")
            elif document.answer is not None:
                row = _answered(renderer, document, ids)
                made = _fitted(document.id, [row] if document.answer else [], length, True)
            else:
                rows = _pieces(next(ids), length)
                made = written(document.id, rows, Counts(split=int(len(rows) > 1)))
            found.append(made)
        yield found


@dataclass(frozen=True)
class _Texts:
    """A document, and the texts whose ids its rows are made of."""

    document: Document
    turns: list[Turn] | None  # of a chat; None of one that the template refuses
    texts: list[Text]

    @property
    def size(self) -> int:
        """Characters."""
        return sum(len(text) for text, _ in self.texts)


def _texts(renderer: ChatRenderer, documents: Iterable[Document]) -> Iterator[_Texts]:
    """The texts of each document; an error names the document."""

    def turns_of(document: Document) -> list[Turn]:
        messages = [] if document.ids else document.messages or []
        return renderer.turns_in_any_time(messages, document.tools)

    for document, turns in each_in_time(turns_of, documents, partial(leave_out, renderer)):
        texts = renderer.turn_texts(turns or ())
        if not document.messages and document.ids is None:
            whole = [(document.whole(), True)] if document.answer is not None else []
            texts = [(document.text, True), *whole]
        yield _Texts(document, turns, texts)


def _decoded(renderer: ChatRenderer, document: Document) -> Rendered:
    """A prompt and its answer, which is taught, by the tokens that were decoded."""
    assert document.ids is not None
    prompt, answer = document.ids
    tokens, known = np.array([*prompt, *answer], np.int32), len(renderer.tokenizer)  # type: ignore[arg-type]
    if tokens.max() >= known:
        raise DistillError(
            f"{document.id}: token {tokens.max()} is not in the vocabulary of {known} tokens, so "
            "another tokenizer made it; drop the row, or its token ids."
        )
    return _row(tokens, len(prompt))


def _answered(renderer: ChatRenderer, document: Document, ids: Iterator[np.ndarray]) -> Rendered:
    """A prompt and its answer, which is taught."""
    tokenizer: Any = renderer.tokenizer
    tokens, whole = next(ids), next(ids)
    if not begins(whole, tokens):
        answer = tokenizer(document.answer, add_special_tokens=False)["input_ids"]
        whole = np.concatenate([tokens, np.array(answer, np.int32)])
    if tokenizer.eos_token_id is not None and whole[-1] != tokenizer.eos_token_id:
        whole = np.append(whole, np.int32(tokenizer.eos_token_id))
    return _row(whole, len(tokens))


def _pieces(tokens: np.ndarray, length: int | None) -> list[Rendered]:
    """A text in rows of at most `length` tokens, all taught but the first token of each."""
    size = length or max(len(tokens), 1)
    return [_row(tokens[at : at + size], 1) for at in range(0, len(tokens), size)]


def _row(tokens: np.ndarray, first: int) -> Rendered:
    """A row that is taught from token `first` on."""
    return Rendered(tokens, np.arange(len(tokens)) >= first, [(first, len(tokens))])


def _fitted(id: str, rows: list[Rendered], length: int | None, truncate: bool) -> Written:
    """Rows cut to `length` at the end of an answer, or inside the first; and what was cut.

    Args:
        truncate: keep as much of a first answer as fits, where it does not fit as a whole.
    """
    counts, fitted = Counts(), []
    for row in rows:
        part = row if length is None else row.cut(length)
        if part.answers or length is None or not truncate:
            counts.cut |= len(part.answers) < len(row.answers)
        else:
            part = row.truncated(length)
            counts.truncated |= bool(part.answers)
        if part.answers:
            fitted.append(part)
    if rows and not fitted:
        counts = Counts(too_long=1)
    return written(id, fitted, counts)
