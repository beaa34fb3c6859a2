"""Rows of JSON as documents: a text, a prompt with or without its answer, or a chat.

The keys that are understood are those of common data sets (see `parse_row`). Errors never quote a
row, which may be private.
"""

from __future__ import annotations

from typing import Any

from .documents import CorpusError, Document, Message

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
    key = text_key(row) if isinstance(row, dict) else None
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


def text_key(row: dict[str, Any]) -> str | None:
    """The key that says what a row is; None where it has none that is known."""
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
