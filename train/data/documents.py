"""Documents, and the files they are read from: text lines, JSONL, JSON arrays, plain or gzipped.

A row of JSON is a text, a prompt with or without its answer, or a chat; the keys that are
understood are those of the data sets that people have (see `parse_row`). Errors name file and line
and never quote a row, which may be private.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Message = dict[str, str]
"""One turn of a chat: `role` (system, user or assistant) and `content`."""

_ROLES = {  # as data sets write them, ShareGPT's `from` included
    **{"system": "system", "developer": "system"},
    **{"user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant"},
}
_PROMPTS = ("prompt", "question", "instruction", "text")
_KEYS = ("messages", "conversations", "turns", *_PROMPTS)
_ANSWERS = {
    "prompt": ("completion", "canonical_solution", "answer"),
    "question": ("answer",),
    "instruction": ("output", "response"),
    "text": ("answer",),  # as `build_corpus` writes its own rows
}
_SPACE = re.compile(r"[ \t\r\n]*")


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and line."""


@dataclass(frozen=True)
class Document:
    """One text.

    `id` is where it came from. A plain text is `text` alone. A prompt that came with its answer
    has both, to be read as `text + answer`. A chat has `messages`, and its `text` is the plain
    rendering of them, for models without a chat template (see `plain_chat`).
    """

    id: str
    text: str
    messages: list[Message] | None = None
    answer: str | None = None

    @classmethod
    def chat(cls, id: str, messages: Sequence[Message]) -> Document:
        """A chat; raises CorpusError unless user and assistant take turns, the user first."""
        turns = [m["role"] for m in messages if m["role"] != "system"]
        late = any(m["role"] == "system" for m in messages[1:])
        if late or turns != (["user", "assistant"] * len(turns))[: len(turns)] or not turns:
            raise CorpusError(
                "the roles do not take turns; expected at most one system message, then user, "
                "assistant, user, …"
            )
        return cls(id, plain_chat(messages), list(messages))

    def whole(self) -> str:
        """All of it as one text."""
        return self.text + (self.answer or "")

    def prompts(self) -> list[Document]:
        """What is to be answered: a chat once for each turn of the assistant, with all before it.

        A chat that ends with the user's turn is a prompt as it stands, and so is a text.
        """
        if self.messages is None:
            return [replace(self, answer=None)]
        ends = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if self.messages[-1]["role"] == "user":
            ends.append(len(self.messages))
        return [Document.chat(self.id, self.messages[:end]) for end in ends]


def plain_chat(messages: Sequence[Message]) -> str:
    r"""A chat as text: each turn behind its role's name, a blank line between turns.

    After a user's turn the assistant's name follows, so that a model goes on with the answer.

    >>> plain_chat([{"role": "user", "content": "Why?"}])
    'User: Why?\n\nAssistant:'
    """
    parts = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    if messages[-1]["role"] == "user":
        parts.append("Assistant:")
    return "\n\n".join(parts)


def file_kind(path: Path) -> str:
    """`.txt`, `.jsonl` or `.json`, gzipped or not; any other file's last suffix."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_file(path: Path, name: str, bad: Callable[[CorpusError], None]) -> Iterator[Document]:
    """The documents of a .txt (one a line), a .jsonl or a .json array, each also as .gz.

    Args:
        name: of the file, the first part of the documents' ids.
        bad: told of every row that cannot be read; the row is left out if it returns.

    Raises:
        CorpusError: the file cannot be read on (not UTF-8, damaged gzip, a broken array).
    """
    kind = file_kind(path)
    if kind == ".json":
        yield from _read_array(path, name, bad)
        return
    for number, line in _lines(path):
        id, where = f"{name}:{number}", f"{path} line {number}"
        if kind == ".txt":
            yield Document(id, line)
            continue
        try:
            yield parse_row(_decode(line), id)
        except CorpusError as error:
            bad(CorpusError(f"{where}: {error}"))


def is_array_of_rows(path: Path) -> bool:
    """Whether a .json file is an array whose first item is a row; other JSON is just text."""
    try:
        text = "".join(line for _, line in _lines(path)).lstrip()
        first, _ = json.JSONDecoder().raw_decode(text, _skip_space(text, 1))
    except (CorpusError, ValueError, RecursionError):
        return False
    return text.startswith("[") and isinstance(first, dict) and bool(_key(first))


def parse_row(row: Any, id: str) -> Document:
    """One row of JSON as a Document. Raises CorpusError, without the place.

    | keys | becomes |
    |---|---|
    | `messages`, or `conversations` with `from` and `value` | a chat |
    | `turns` | a chat of the first, since the later ones answer replies never written |
    | `question` (and `answer`) | a chat of one turn and its answer |
    | `instruction` (and `input`; and `output` or `response`) | the same, `input` a paragraph more |
    | `prompt` (and `completion`, `canonical_solution` or `answer`) | a prompt and its answer |
    | `text` | a text |
    """
    key = _key(row) if isinstance(row, dict) else None
    if key is None:
        raise CorpusError(f"expected an object with one of the keys {', '.join(_KEYS)}")
    value = row[key]
    if key in ("messages", "conversations"):
        return Document.chat(id, _messages(value, key))
    if key == "turns":
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict):
            return Document.chat(id, _messages(value, key))
        return Document.chat(id, [_user(_text(first, "turns[0]"))])
    text = _text(value, key)
    answers = [row[name] for name in _ANSWERS[key] if row.get(name)]
    answer = _text(answers[0], "the answer") if answers else None
    if key in ("prompt", "text"):
        return Document(id, text, answer=answer)
    if key == "instruction" and row.get("input"):
        text += "\n\n" + _text(row["input"], "input")
    reply = [{"role": "assistant", "content": answer}] if answer else []
    return Document.chat(id, [_user(text), *reply])


def _key(row: dict[str, Any]) -> str | None:
    return next((key for key in _KEYS if row.get(key) is not None), None)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{key} is not a list of messages, or is empty")
    messages = []
    for number, item in enumerate(value, start=1):
        found = item if isinstance(item, dict) else {}
        role = found.get("role", found.get("from"))
        if not isinstance(role, str) or role not in _ROLES:
            raise CorpusError(
                f"{key}: the role of message {number} is missing or unknown; expected system, "
                "user or assistant"
            )
        content = found.get("content", found.get("value"))
        if content == "" and _ROLES[role] == "system":
            continue  # many data sets have a place for one and leave it empty
        content = _text(content, f"{key}: message {number}")
        messages.append({"role": _ROLES[role], "content": content})
    return messages


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{what} is not a string")
    if not value.strip():
        raise CorpusError(f"{what} is empty; fill or drop the row")
    if any("\ud800" <= character <= "\udfff" for character in value):
        # JSON allows "\ud800" alone, but it has no UTF-8 form and no tokens.
        raise CorpusError(f"{what} holds half a surrogate pair; write the whole character")
    return value


def _decode(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # it holds the row: not to be chained
        message = f"not valid JSON ({error.msg}, column {error.colno}); fix or drop the line"
        raise CorpusError(message) from None
    except RecursionError:
        raise CorpusError("JSON nested too deep; fix or drop the line") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise CorpusError(f"{path} line {number}: not UTF-8; convert the file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise CorpusError(
            f"{path} line {number + 1}: damaged gzip data; fetch the file again"
        ) from None


def _read_array(path: Path, name: str, bad: Callable[[CorpusError], None]) -> Iterator[Document]:
    """The rows of one JSON array. Decoded one by one, so that errors can name a line."""
    lines = dict(_lines(path))
    text = "\n".join(lines.get(n, "") for n in range(1, max(lines, default=0) + 1))
    decoder = json.JSONDecoder()
    line, counted, at = 1, 0, _skip_space(text, 0)
    more = text[at : at + 1] == "["
    at = _skip_space(text, at + 1)
    if not more:
        raise CorpusError(f"{path} line 1: not a JSON array; expected [ and rows, or use .jsonl")
    number = 0
    while text[at : at + 1] != "]" or number:
        number += 1
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            # Where a broken array's next row begins cannot be told: no policy can skip this.
            line, message = getattr(error, "lineno", line), getattr(error, "msg", "nested too deep")
            raise CorpusError(
                f"{path} line {line}: not valid JSON ({message}); fix the file"
            ) from None
        try:
            yield parse_row(row, f"{name}:{number}")
        except CorpusError as error:
            bad(CorpusError(f"{path} line {line}: {error}"))
        at = _skip_space(text, at)
        if text[at : at + 1] == "]":
            return
        if text[at : at + 1] != ",":
            line += text.count("\n", counted, at)
            raise CorpusError(f"{path} line {line}: not valid JSON (no comma); fix the file")
        at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
