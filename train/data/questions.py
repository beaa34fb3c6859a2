"""Questions of a benchmark: prompts, chats, and the turns that a user takes one after the other.

Spec-Bench and MT-Bench are read as they are published: an object a line with `question_id`,
`category` and `turns`, the strings that a user says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .documents import CorpusError, Document, Message, plain_chat
from .file_rows import READERS, file_kind, read_rows
from .parsing import parse_row
from .reading import order, read_documents


@dataclass(frozen=True)
class Question:
    """A prompt with the category that it is reported under.

    Attributes:
        document: the prompt of the first turn.
        later: what the user says after each answer.
    """

    id: str
    category: str
    document: Document
    later: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """How many answers are asked for."""
        return 1 + len(self.later)

    def after(self, answers: list[str]) -> Document:
        """The prompt of the next turn, with the answers given so far."""
        messages: list[Message] = list(self.document.messages or ())
        for answer, said in zip(answers, self.later, strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": said})
        if not answers:
            return self.document
        return replace(self.document, text=plain_chat(messages), messages=messages)


def read_questions(path: Path) -> list[Question]:
    """All questions of what `read_documents` reads, in the order of the hash of their ids.

    `turns` of strings are turns of the user's, to be answered one after the other; a chat is a
    prompt with the answers that are given in it. Raises CorpusError, which names file and line.
    """
    if not path.is_file() or file_kind(path) not in READERS:
        return [Question(doc.id, "", doc) for doc in read_documents(path)]
    unit, rows = read_rows(path)
    found = []
    for number, row in rows:
        try:
            if isinstance(row, CorpusError):
                raise row
            found.append(_question(row, f"{path.name}:{number}"))
        except CorpusError as error:
            raise CorpusError(f"{path} {unit} {number}: {error}") from None
    return sorted(found, key=lambda question: order(question.document.id))


def _question(row: Any, id: str) -> Question:
    document = parse_row(row, id).prompts()[-1]
    given: Mapping[str, Any] = row
    category, turns = given.get("category", ""), given.get("turns")
    if not isinstance(category, str):
        raise CorpusError("category is not a string")
    later: list[str] = []
    if isinstance(turns, list) and isinstance(turns[0], str) and document.messages:
        later = turns[1:]
        for place, turn in enumerate(later, start=1):
            if not isinstance(turn, str) or not turn.strip():
                raise CorpusError(f"turns[{place}] is not a string, or is empty")
    name = given.get("question_id", id)
    return Question(str(name), category, document, later)
