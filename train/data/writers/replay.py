"""A chat whose answers are written anew, one after the other, so that the history is the target's.

The first question is answered; the answer takes the place of the given one, and the next question
is asked after it; and so on, to the end of the chat, or to the row's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ...recipe import Distill
from ..documents import ChatTemplateError, Document, Message
from ..prefixes import leave_out
from ..rendering import ChatRenderer, Rendered, add_answer
from .units import Counts, Written, order_of, written

Order = tuple[list[int], int]
"""The numbers of the documents that are taken, in their order, and how many are passed over."""


def order_of_asked(documents: Sequence[Document], spec: Distill, seed: int) -> Order:
    """The order in which documents are answered; greedily none that asks what one before it does.

    Its row would be the same. Of no more documents than are taken is it known what they ask.
    """
    order = order_of(len(documents), seed)
    if spec.temperature > 0:
        return order, 0
    seen, taken = set[bytes](), list[int]()
    for at, number in enumerate(order):
        if len(taken) == spec.examples:
            return taken + order[at:], at - len(taken)
        if (asked := _asked_by(documents[number], spec)) not in seen:
            seen.add(asked)
            taken.append(number)
    return taken, len(order) - len(taken)


def _asked_by(document: Document, spec: Distill) -> bytes:
    """A hash of all that decides a document's greedy answers."""
    said: list[Any] = [document.text, document.ids and document.ids[0]]
    if document.messages is not None:
        said, asked = [document.tools], False
        for message in document.messages:
            if message["role"] == "tool" or (asked and spec.turns == "first"):
                break
            if message["role"] != "assistant" or not asked:
                said.append(message)
            asked |= message["role"] == "user"
    return blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Asked:
    """What is to be answered."""

    messages: list[Message]  # the chat so far, as it is rendered; empty for a text
    tokens: list[int]  # the prompt
    room: int  # tokens that the answer may have


class Replay:
    """One document that is being answered: `ask`, then `take` the answer, until `ask` gives None.

    Args:
        ends: the ids that end a turn.
        number: the unit's.
    """

    def __init__(
        self,
        document: Document,
        renderer: ChatRenderer,
        spec: Distill,
        ends: set[int],
        number: int = 0,
    ):
        self.document, self.renderer, self.spec, self.ends = document, renderer, spec, ends
        self.number = number
        self.history: list[Message] = []
        self.answers, self.finished = 0, True  # whether the last answer came to its end
        self.rows: list[Rendered] = []
        self.counts = Counts()
        self._coming = list(document.messages or [{"role": "user", "content": document.text}])
        self._asked: Asked | None = None

    @property
    def turns(self) -> int:
        """Questions that have not been asked yet."""
        return sum(message["role"] == "user" for message in self._coming)

    def ask(self) -> Asked | None:
        """The next prompt; None where the chat is at its end, or the next one does not fit."""
        if self.document.messages and not self._next_question():
            return None
        if self.document.messages is None and not self._coming:
            return None
        tokens = self._prompt()
        self._coming = self._coming if self.document.messages else []
        first, limit = not self.answers, self.spec.row_tokens
        fits = len(tokens) < limit and (not first or len(tokens) <= self.spec.prefix_tokens)
        if not tokens or not fits:
            self.counts.too_long = int(first and not fits)
            self.counts.cut = int(not first and not fits)
            self._coming = []
            return None
        messages = self.renderer.whole(self.history) if self.document.messages else []
        self._asked = Asked(messages, tokens, min(self.spec.new_tokens, limit - len(tokens)))
        return self._asked

    def add(self, answer: list[int]) -> None:
        """Put the ids of an answer after the last prompt."""
        assert self._asked is not None
        prompt = self._asked.tokens
        add_answer(self.rows, np.array([*prompt, *answer], np.int32), len(prompt))

    def take(self, answer: list[int]) -> None:
        """Take an answer by its ids, and go on; one without an end token ends the chat."""
        self.add(answer)
        ended = bool(answer) and answer[-1] in self.ends
        self.go_on(self._message(answer, ended), ended)

    def _message(self, answer: list[int], ended: bool) -> Message:
        """An answer as a template takes it: in parts, where the tokenizer says how to find them.

        Some templates (GPT-OSS) refuse thinking that stands in the content.
        """
        tokenizer: Any = self.renderer.tokenizer
        exact = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        said = {"content": str(tokenizer.decode(answer[:-1] if ended else answer, **exact))}
        if self.renderer.plain or not getattr(tokenizer, "response_template", None):
            return said
        assert self._asked is not None
        try:
            found = tokenizer.parse_response(answer, prefix=self._asked.tokens)
        except ValueError:  # an answer of another form
            return said
        return found | {"content": found.get("content") or ""}

    def go_on(self, said: Message, ended: bool) -> None:
        """Go on after an answer; not after one that is empty, or that was not finished.

        Nor after one that calls tools: what they would return is not known.
        """
        self.history.append({"role": "assistant"} | said)
        self.answers, self.finished = self.answers + 1, ended
        if self._coming and not ended:
            self.counts.unfinished = 1
        last = self.spec.turns == "first" or not ended
        if last or not said["content"].strip() or said.get("tool_calls"):
            self._coming = []

    def leave_unanswered(self) -> None:
        """End the chat before the last question, whose answer is empty."""
        self.history.pop()
        self._coming = []
        self.counts.empty = 1

    def result(self) -> Written:
        """The rows, and what became of the document."""
        return written(self.document.id, self.rows, self.counts)

    def _next_question(self) -> bool:
        """Move messages to the history up to the user's next one; False where there is none.

        Given answers are left out, but for those before the first question.
        """
        while self._coming:
            message = self._coming.pop(0)
            if message["role"] == "tool":  # it answers a call that the target did not make
                self._coming = []
                return False
            answered = any(each["role"] == "user" for each in self.history)
            if message["role"] == "assistant" and answered:
                continue
            self.history.append(message)
            if message["role"] == "user":
                return True
        return False

    def _prompt(self) -> list[int]:
        if self.document.messages is None:
            if self.document.ids and not self.document.text:
                return list(self.document.ids[0])
            return self.renderer.encoder([(self.document.text, True)])[0].tolist()
        try:
            return self.renderer.prompt(self.history, self.document.tools)
        except ChatTemplateError as error:
            own = "its answers are the target's own: set distill.turns=first"
            leave_out(self.renderer, self.document, error, own if self.answers else "drop the row")
            self.counts.refused = 1
            return []
