"""Documents: texts, prompts and chats."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_BYTES = 4  # of a token's text, more or less
_IN_TIME = 1000  # messages that a template may be asked to write in one time limit, more or less
_SECONDS = 20  # for a chat template, which is a program of others; real ones take milliseconds

Message = dict[str, Any]
"""One turn of a chat: `role` (system, user, assistant or tool) and `content`.

Messages of tools may also have `tool_calls`, `tool_call_id`, `name` and `reasoning_content`.
"""

_FOLLOWS = {  # what may stand before a turn; None is the start, behind the system's message
    "user": {None, "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and line."""


class ChatTemplateError(ValueError):
    """A tokenizer's template refuses a chat; the message does not quote the chat."""


class DroppedCallsError(ChatTemplateError):
    """A tokenizer's template leaves calls of tools out."""

    def __init__(self) -> None:
        super().__init__(
            "the tokenizer's chat template leaves calls of tools out, as plain chats do"
        )


class EndlessTemplateError(ChatTemplateError):
    """A tokenizer's template does not end, whatever chat it is given."""


@dataclass(frozen=True)
class Document:
    """A text, a prompt or a chat."""

    id: str  # where it came from
    text: str  # of a chat, what `plain_chat` writes, for models without a chat template
    messages: list[Message] | None = None  # of a chat
    # of a prompt: what came with it, to be read as `text + answer`; empty where nothing did
    answer: str | None = None
    source: str = ""  # the name of the source in the corpus
    tools: list[Any] | None = None  # of a chat: what its template is told of tools, JSON
    category: str = ""  # of a prompt, such as MT-bench's; only reports read it
    # the tokens of the prompt and those of the last answer, as they were decoded; where no more is
    # known, the text is empty
    ids: list[list[int]] | None = None
    opening: str = ""  # where only the tokens are known: what stood before the first answer

    @classmethod
    def chat(
        cls,
        id: str,
        messages: Sequence[Message],
        source: str = "",
        tools: list[Any] | None = None,
    ) -> Document:
        """A chat; raises CorpusError unless user and assistant take turns, the user first."""
        check_turns(messages)
        return cls(id, plain_chat(messages), list(messages), source=source, tools=tools)

    def whole(self) -> str:
        """All of it as one text."""
        return self.text + (self.answer or "")

    @property
    def size(self) -> int:
        """Bytes of its text; of tokens alone, about as many as theirs would have."""
        if self.ids is not None and not self.text:
            return _BYTES * sum(map(len, self.ids))
        return len(self.whole().encode())

    def prompts(self) -> list[Document]:
        """What is to be answered: a chat once for each turn of the assistant, with all before it.

        A chat that ends with another's turn is a prompt as it stands, and so is a text. Of one
        whose tokens are known it is the last answer alone.
        """
        if self.messages is None:
            return [replace(self, answer=None)]
        ends = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        ends = ends[-1:] if self.ids else ends
        if self.messages[-1]["role"] != "assistant":
            ends.append(len(self.messages))
        cut = [self.messages[:end] for end in ends]
        return [replace(self, text=plain_chat(part), messages=part) for part in cut]

    def first_prompt(self) -> str:
        """The text up to the first answer, by which the turns of a chat are known to be of one; all
        of a document that is no chat.

        All numbers in a system prompt are 0, since it may tell the time, and then differs between
        turns. Of a document of tokens alone it is its `opening`, else the numbers of its prompt's.
        """
        if self.messages is None:
            numbers = " ".join(map(str, self.ids[0] if self.ids else ()))
            return self.text or self.opening or numbers
        roles = [m["role"] for m in self.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        return opening(self.messages[:end])


def opening(messages: Iterable[Message]) -> str:
    """The text of messages, all numbers of system prompts as 0.

    >>> opening([{"role": "system", "content": "It is 12:05."}, {"role": "user", "content": "4?"}])
    'It is 0:0.\\n\\n4?'
    """
    return "\n\n".join(
        re.sub(r"\d+", "0", m["content"]) if m["role"] == "system" else m["content"]
        for m in messages
    )


def check_turns(messages: Sequence[Message]) -> None:
    """Raise CorpusError unless the turns are those of a chat.

    At most one system message, then user, assistant, user, …; what tools return stands between two
    turns of the assistant.
    """
    system = bool(messages) and messages[0]["role"] == "system"
    before: str | None = None
    for message in messages[system:]:
        role = message["role"]
        if before not in _FOLLOWS.get(role, ()):
            break
        before = role
    else:
        if before is not None:
            return
    raise CorpusError(
        "the roles do not take turns; expected at most one system message, then user, assistant, "
        "user, …"
    )


def plain_chat(messages: Sequence[Message]) -> str:
    r"""A chat as text: each turn behind its role's name, a blank line between turns.

    After a user's turn the assistant's name follows, so that a model goes on with the answer.

    >>> plain_chat([{"role": "user", "content": "Why?"}])
    'User: Why?\n\nAssistant:'
    """
    parts = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    if messages[-1]["role"] != "assistant":
        parts.append("Assistant:")
    return "\n\n".join(parts)


def render_chat(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> str:
    """A chat as the tokenizer's template writes it, special tokens included.

    After a user's turn the text ends where the answer begins. Raises ChatTemplateError where the
    template refuses the chat, or does not end.

    Args:
        tools: what the template is told of tools; a tokenizer may have a template for such chats.
    """
    due = messages[-1]["role"] != "assistant"
    how = {"tools": tools, "add_generation_prompt": due, "tokenize": False}
    return str(in_time(lambda: apply_template(tokenizer, messages, **how)))


def in_time(call: Callable[[], Result]) -> Result:
    """What `call()` returns, which applies a chat template; EndlessTemplateError past a limit."""
    from headstart.heads.core import within

    try:
        return within(_SECONDS, call)
    except TimeoutError as error:
        raise EndlessTemplateError(
            f"the tokenizer's chat template does not end ({error}); use another tokenizer or "
            "template"
        ) from None


def each_in_time(
    call: Callable[[Document], Result],
    documents: Iterable[Document],
    refused: Callable[[Document, ChatTemplateError], None],
) -> Iterator[tuple[Document, Result | None]]:
    """Each document, and what `call` makes of it, which applies a chat template to chats.

    A time limit takes a thread, so there is one for several chats. Texts have none.

    Args:
        refused: called with a chat that the template refuses, whose result is None, unless it
            raises.
    """
    for chats, some in itertools.groupby(documents, lambda document: bool(document.messages)):
        if not chats:
            yield from ((document, call(document)) for document in some)
            continue
        # Each answer is written with all before it.
        for group in in_groups(some, lambda d: 1 + len(d.messages or ()) ** 2, _IN_TIME):
            found: list[tuple[Document, Result | None]] = []

            def make(group: list[Document] = group, found: list[Any] = found) -> None:
                for document in group[len(found) :]:
                    found.append((document, call(document)))

            while len(found) < len(group):
                try:
                    in_time(make)
                except ChatTemplateError as error:
                    document = group[len(found)]
                    refused(document, error)
                    found.append((document, None))
            yield from found


def in_groups(
    items: Iterable[Item], size: Callable[[Item], int], enough: int
) -> Iterator[list[Item]]:
    """Items one after the other, in groups that end where their sizes add up to enough.

    >>> list(in_groups(["a", "bcd", "e"], len, 3))
    [['a', 'bcd'], ['e']]
    """
    group: list[Item] = []
    found = 0
    for item in items:
        group.append(item)
        found += size(item)
        if found >= enough:
            yield group
            group, found = [], 0
    if group:
        yield group


def apply_template(tokenizer: Any, messages: list[Message], **how: Any) -> Any:
    """What `apply_chat_template` returns; a ChatTemplateError where the template refuses the chat.

    The template may take any time, see `in_time`.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, **how)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)[:80]
        said = f"the tokenizer's chat template refuses a chat of the roles {roles}"
        template = tokenizer.get_chat_template(how.get("chat_template"), how.get("tools"))
        reason = " ".join(str(error).split())
        if reason and str(error) in template:  # its own words alone: others may quote the chat
            said += f" ({reason})"
        raise ChatTemplateError(said) from None


def apply_template_to_each(tokenizer: Any, chats: list[list[Message]], **how: Any) -> list[Any]:
    """`apply_template` of each chat; one call of the tokenizer, where no chat is refused."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(chats, **how)
    except (TemplateError, TypeError):  # one of them is; which one is found by itself
        return [apply_template(tokenizer, messages, **how) for messages in chats]
