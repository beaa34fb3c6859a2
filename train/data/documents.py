"""Documents: the texts, prompts and chats of a corpus, and how rows of JSON become them.

Errors never quote a row, which may be private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, str]
"""One turn of a chat: `role` (system, user or assistant) and `content`."""

_ROLES = {  # as data sets write them, ShareGPT's `from` included
    **{"system": "system", "developer": "system"},
    **{"user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant"},
}
_ANSWERS = {  # the keys of a prompt, and those of its answer
    "prompt": ("completion", "canonical_solution", "answer"),
    "question": ("answer",),
    "instruction": ("output", "response"),
    "text": ("answer",),  # as `build_corpus` writes its own rows
}
_KEYS = ("messages", "conversations", "turns", *_ANSWERS)


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and line."""


class ChatTemplateError(ValueError):
    """A tokenizer's template refuses a chat; the message does not quote the chat."""


@dataclass(frozen=True)
class Document:
    """A text, a prompt or a chat."""

    id: str  # where it came from
    text: str  # of a chat, what `plain_chat` writes, for models without a chat template
    messages: list[Message] | None = None  # of a chat
    answer: str | None = None  # what came with a prompt, to be read as `text + answer`

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


def render_chat(tokenizer: Any, messages: list[Message]) -> str:
    """A chat as the tokenizer's template writes it, special tokens included.

    After a user's turn the text ends where the answer begins. Raises ChatTemplateError where the
    template refuses the roles.
    """
    from jinja2 import TemplateError

    due = messages[-1]["role"] == "user"
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=due, tokenize=False)
    except TemplateError:  # its message may quote the chat
        roles = ", ".join(message["role"] for message in messages)[:80]
        said = f"the tokenizer's chat template refuses the roles {roles}"
        raise ChatTemplateError(said) from None
    return str(text)


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
    first = value[0] if key == "turns" and isinstance(value, list) and value else None
    if key in ("messages", "conversations") or isinstance(first, dict):
        return Document.chat(id, _messages(value, key))
    text = _text(first, "turns[0]") if key == "turns" else _text(value, key)
    answers = [row[name] for name in _ANSWERS.get(key, ()) if row.get(name)]
    answer = _text(answers[0], "the answer") if answers else None
    if key in ("prompt", "text"):
        return Document(id, text, answer=answer)
    if key == "instruction" and row.get("input"):
        text += "\n\n" + _text(row["input"], "input")
    reply = [{"role": "assistant", "content": answer}] if answer else []
    return Document.chat(id, [{"role": "user", "content": text}, *reply])


def text_key(row: dict[str, Any]) -> str | None:
    """The key that says what a row is; None where it has none that is known."""
    return next((key for key in _KEYS if row.get(key) is not None), None)


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
