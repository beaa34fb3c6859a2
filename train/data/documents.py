"""Documents: the texts, prompts and chats of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Message = dict[str, str]
"""One turn of a chat: `role` (system, user or assistant) and `content`."""


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
