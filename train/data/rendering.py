"""Chats as token ids, with the mask of what the assistant writes, through any chat template.

What is supervised is found by rendering a chat twice for each answer: up to where it begins, as a
model is prompted, and up to its end. So every answer follows exactly the ids that a model is given.
A conversation is one row where each prompt begins with the row so far, id by id; where the template
writes earlier turns otherwise than it wrote them when they were the last (Qwen3 drops their
thinking), each answer is a row of its own.

    prompt     <user>Why?<assistant>
    to the end <user>Why?<assistant>Because.<end>\\n       "\\n" is the template's, not the model's
    supervised                      ^^^^^^^^^^^^^
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..recipe import Chat
from .documents import (
    ChatTemplateError,
    DroppedCallsError,
    Message,
    apply_template,
    apply_template_to_each,
    in_time,
    plain_chat,
)
from .tokenising import Encoder, Text
from .tool_calls import renamed

Tools = list[Any] | None
"""What a template is told of tools: JSON schemas."""

_ANSWER = "\u2063answer\u2063"  # stands for an answer where its end is looked for
_MARKS = re.compile(r"\{%-?\s*generation\b")
_CLOCK = re.compile(r"strftime_now\s*\(\s*(['\"])(.*?)\1\s*\)")
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Rendered:
    """A training row: token ids, and where the answers in it stand.

    Attributes:
        supervised: for each token, whether the assistant writes it.
        answers: the first token of each answer, and the one after its last.
    """

    tokens: np.ndarray  # [L] int32
    supervised: np.ndarray  # [L] bool
    answers: list[tuple[int, int]]

    def cut(self, length: int) -> Rendered:
        """The answers that end within the first `length` tokens; perhaps none, and no token."""
        kept = [answer for answer in self.answers if answer[1] <= length]
        end = kept[-1][1] if kept else 0
        return Rendered(self.tokens[:end], self.supervised[:end], kept)

    def truncated(self, length: int) -> Rendered:
        """The first answer, as far as it is within the first `length` tokens; perhaps none."""
        first = self.answers[0][0]
        kept = [(first, length)] if first < length else []
        return Rendered(self.tokens[:length], self.supervised[:length], kept)

    def last(self) -> Rendered:
        """The same row with its last answer alone supervised."""
        mask = self.supervised.copy()
        mask[: self.answers[-1][0]] = False
        return Rendered(self.tokens, mask, self.answers[-1:])


@dataclass(frozen=True)
class Turn:
    """An answer before it is tokenised."""

    prompt: str
    whole: str  # the prompt and the answer
    messages: list[Message] | None  # of the chat so far, where the template writes just that
    tools: Tools


def add_answer(
    rows: list[Rendered], tokens: np.ndarray, first: int, marked: Sequence[bool] | None = None
) -> None:
    """Add an answer to the last row where its prompt begins exactly with that, else in a new row.

    Args:
        tokens: [L] int32, the prompt and, from `first` on, the answer.
        marked: for each token, whether a template marks it to be trained on; the end of the answer
            is trained on in any case. All of it, when None.
    """
    taught = np.zeros(len(tokens), bool)
    taught[first:] = True
    if marked is not None:
        taught[first:-1] = marked[first:-1]
    answers = [(first, len(tokens))]
    if rows and begins(tokens, rows[-1].tokens):
        before = rows.pop()
        taught[: len(before.tokens)] = before.supervised
        answers = before.answers + answers
    rows.append(Rendered(tokens, taught, answers))


def begins(tokens: np.ndarray, start: np.ndarray) -> bool:
    """Whether tokens begin with all of `start`; both int32, which are compared as bytes."""
    return tokens[: len(start)].tobytes() == start.tobytes()


class ChatRenderer:
    """Renders chats with one tokenizer, as `chat` and `distill.chat` of a recipe say.

    Args:
        how: `template`, `plain` (see `plain_chat`), or `auto`, the template where there is one.

    Raises:
        ChatTemplateError: `template`, and there is none; or one that cannot print a fixed date.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None, how: str = "auto"
    ):
        self.tokenizer, self.chat = tokenizer, chat or Chat()
        if how == "template" and not tokenizer.chat_template:
            raise ChatTemplateError(
                "distill.chat is template, but the tokenizer has none; set it to plain or auto."
            )
        self.plain = how == "plain" or not tokenizer.chat_template
        self.encoder = Encoder(tokenizer)
        date = datetime.date.fromisoformat(self.chat.date)
        # Of chats without tools and with them: a tokenizer may have a template for each.
        self.templates = () if self.plain else (self._on(date, False), self._on(date, True))
        self._marks = [bool(_MARKS.search(template)) for template in self.templates]
        self._tails: dict[bool, tuple[str, str]] = {}  # by whether there are tools
        self._options = {"date_string": date.strftime("%d %b %Y")} | self.chat.template_kwargs

    def _on(self, date: datetime.date, tools: bool) -> str:
        """The template of chats with or without tools, with `strftime_now` answered for a date."""
        try:
            some: Any = [{}] if tools else None
            template = self.tokenizer.get_chat_template(tools=some)
        except ValueError:  # several lines
            names = ", ".join(sorted(self.tokenizer.chat_template or ()))
            raise ChatTemplateError(
                f"the tokenizer has chat templates by the names {names}; expected one named "
                "default: set distill.chat=plain, or rename one."
            ) from None

        def answer(call: re.Match[str]) -> str:
            return repr(date.strftime(call[2]))

        template = _CLOCK.sub(answer, template)
        if re.search(r"strftime_now\s*\(", template):
            raise ChatTemplateError(
                "the tokenizer's chat template prints today's date in a computed format, so rows "
                "would differ from day to day; set distill.chat=plain, or another chat template."
            )
        return template

    @property
    def template_hash(self) -> str | None:
        """sha256 of the template and of all settings that it is rendered with; None if plain.

        Where chats with tools have a template of their own, of both.
        """
        if self.plain:
            return None
        settings = sorted(self._options.items()), self.chat.tools, self.chat.system
        text = "".join(dict.fromkeys(self.templates))
        return hashlib.sha256(f"{text}{settings!r}".encode()).hexdigest()

    @property
    def server_options(self) -> dict[str, Any]:
        """What a server is told so that its template renders alike: settings, perhaps a date."""
        known = any("date_string" in template for template in self.templates)
        return self._options if known else self.chat.template_kwargs

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The ids up to where the next answer begins, as a model is prompted with them."""
        return self.encode(self.text(messages, True, tools))

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; a template writes the special tokens itself."""
        return self.encoder([(text, self.plain)])[0].tolist()

    def text(self, messages: Sequence[Message], prompt: bool = False, tools: Tools = None) -> str:
        """A chat as text; with `prompt`, up to where the answer begins.

        Raises ChatTemplateError where the template refuses the chat, or does not end.

        Args:
            tools: the chat's own; those of the recipe when None.
        """
        return in_time(lambda: self.texts_in_any_time([messages], prompt, tools)[0])

    def texts_in_any_time(
        self, chats: Sequence[Sequence[Message]], prompt: bool = False, tools: Tools = None
    ) -> list[str]:
        """`text` of several chats, for a caller that has a time limit of its own."""
        chats = [self.whole(messages) for messages in chats]
        if self.plain:
            return [plain_chat(messages) for messages in chats]
        how = self._how(tools, add_generation_prompt=prompt, tokenize=False)
        return apply_template_to_each(self.tokenizer, chats, **how)

    def whole(self, messages: Sequence[Message]) -> list[Message]:
        """The chat, opened by `chat.system` where it has no system prompt of its own."""
        system = self.chat.system
        if system is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": system}, *messages]

    def _how(self, tools: Tools, **how: Any) -> dict[str, Any]:
        """What the template is applied with, to chats that have these tools of their own."""
        how |= {"tools": tools or self.chat.tools or None}
        how["chat_template"] = self.templates[self._has(tools)]
        return dict(**how, **self._options)

    def _has(self, tools: Tools) -> bool:
        """Whether a chat with these tools of its own is rendered with any."""
        return bool(tools or self.chat.tools)

    def rows(
        self, messages: Sequence[Message], open_end: bool = False, tools: Tools = None
    ) -> list[Rendered]:
        """The rows that teach every answer of a chat; see `rows_of`."""
        return self.rows_of([(messages, tools)], open_end)[0]

    def rows_of(
        self, chats: Sequence[tuple[Sequence[Message], Tools]], open_end: bool = False
    ) -> list[list[Rendered]]:
        """The rows that teach every answer of each chat: one, where the template lets it.

        Args:
            chats: messages, and the chat's own tools.
            open_end: the last answer was not finished: it has no end-of-turn token.

        Raises:
            ChatTemplateError: the template refuses a chat, or drops what it is to teach.
        """
        turns = [self.turns(messages, tools, open_end) for messages, tools in chats]
        ids = iter(self.encoder([text for each in turns for text in self.turn_texts(each)]))
        return [self.rows_from(each, ids) for each in turns]

    def turn_texts(self, turns: Iterable[Turn]) -> list[Text]:
        """What `rows_from` needs the ids of; a template writes the special tokens itself."""
        return [(text, self.plain) for turn in turns for text in (turn.prompt, turn.whole)]

    def rows_from(self, turns: Sequence[Turn], ids: Iterator[np.ndarray]) -> list[Rendered]:
        """The rows of a chat's `turns`, given the ids of their `turn_texts`."""
        rows: list[Rendered] = []
        for turn in turns:
            prompt, whole = next(ids), next(ids)
            if not begins(whole, prompt):  # a token crosses its end, where no model writes one
                answer = self._alone(turn.whole[len(turn.prompt) :])
                whole = np.array([*prompt, *answer], np.int32)
            add_answer(rows, whole, len(prompt), self._marked(turn, whole))
        return rows

    def _alone(self, answer: str) -> list[int]:
        """The ids of an answer that a token of a kind of its own stands before."""
        before = self.tokenizer.eos_token
        if before is None:
            return self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return self.tokenizer(f"{before}{answer}", add_special_tokens=False)["input_ids"][1:]

    def turns(
        self, messages: Sequence[Message], tools: Tools = None, open_end: bool = False
    ) -> list[Turn]:
        """The answers, each with the prompt before it. Answers before any question are left out.

        Raises ChatTemplateError as `rows_of` does, or where the template does not end.
        """
        return in_time(lambda: self.turns_in_any_time(messages, tools, open_end))

    def turns_in_any_time(
        self, messages: Sequence[Message], tools: Tools = None, open_end: bool = False
    ) -> list[Turn]:
        """The same, for a caller that has a time limit of its own."""
        asked = next((at for at, m in enumerate(messages) if m["role"] == "user"), len(messages))
        places = [at for at, m in enumerate(messages) if m["role"] == "assistant" and at > asked]
        if not places:
            return []
        prompts = self.texts_in_any_time([messages[:at] for at in places], True, tools)
        wholes = self.texts_in_any_time([messages[: at + 1] for at in places], False, tools)
        for at, text in zip(places, wholes, strict=True):
            if self.chat.supervise == "all" or at == places[-1]:
                self._check_calls(messages[: at + 1], text, tools)
        turns = [
            self._turn(messages[: at + 1], prompt, text, tools, open_end and at == places[-1])
            for at, prompt, text in zip(places, prompts, wholes, strict=True)
        ]
        if self.plain and not open_end:  # no token ends a turn, so the end of text ends the chat
            end = str(self.tokenizer.eos_token or "")
            turns[-1] = replace(turns[-1], whole=turns[-1].whole + end)
        return turns

    def _check_calls(self, messages: Sequence[Message], text: str, tools: Tools) -> None:
        """Raise DroppedCallsError where the last answer's calls of tools are not in the text."""
        if calls := messages[-1].get("tool_calls"):
            others = [*messages[:-1], messages[-1] | {"tool_calls": renamed(calls)}]
            if others != messages and self.texts_in_any_time([others], tools=tools) == [text]:
                raise DroppedCallsError

    def _turn(
        self, messages: Sequence[Message], prompt: str, text: str, tools: Tools, open_end: bool
    ) -> Turn:
        """The last answer of a chat, to the end of its end-of-turn token.

        Args:
            prompt, text: the chat up to that answer, and all of it, as the template writes them.
        """
        tail, end = self._tail(tools)
        if not text.endswith(tail):  # calls of tools may have an end of their own
            tail, end = text[len(text.rstrip()) :], ""
            if open_end or not text.rstrip().endswith(self._known):
                tail = None
        if tail is None:
            raise ChatTemplateError(
                "the tokenizer's chat template ends this chat otherwise than it ends a chat of one "
                "question; set distill.chat=plain, or use distill.writer=own"
            )
        end = "" if open_end else end
        text = text[: len(text) - len(tail)] + end
        if text.startswith(prompt):
            return Turn(prompt, text, self.whole(messages), tools)
        calls = messages[-1].get("tool_calls")  # which stand behind the content
        rest = None if calls else after_prompt(prompt, messages[-1]["content"])
        if rest is None:
            raise ChatTemplateError(
                "the tokenizer's chat template begins the answer otherwise than its prompt ends "
                "(thinking that this chat does not hold?); set chat.template_kwargs, such as "
                "{enable_thinking: false}, or distill.chat=plain, or distill.writer=own"
            )
        return Turn(prompt, prompt + rest + end, None, tools)

    def _marked(self, turn: Turn, tokens: np.ndarray) -> list[bool] | None:
        """For each of the tokens, whether a `{% generation %}` block holds it; None without one."""
        if self.plain or turn.messages is None or not self._marks[self._has(turn.tools)]:
            return None
        how = self._how(turn.tools, return_dict=True, return_assistant_tokens_mask=True)
        found, ids = apply_template(self.tokenizer, turn.messages, **how), tokens.tolist()
        marked = [bool(on) for on in found["assistant_masks"][: len(ids)]]
        chars = found.token_to_chars
        for at in range(1, len(marked)):  # of a last character's tokens the first one is marked
            marked[at] = marked[at] or (marked[at - 1] and chars(at) == chars(at - 1))
        return marked if found["input_ids"][: len(ids)] == ids else None

    def _tail(self, tools: Tools) -> tuple[str, str]:
        """What follows an answer at the end of a chat, and how much of it the model writes.

        That ends with the first token that the tokenizer has as a whole, such as `<|im_end|>`.
        """
        if (known := self._tails.get(self._has(tools))) is not None:
            return known
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": _ANSWER}
        (text,) = self.texts_in_any_time([[question, answer]], tools=tools)
        _, found, tail = text.rpartition(_ANSWER)
        if not found:
            raise ChatTemplateError(
                "the tokenizer's chat template leaves answers out; set distill.chat=plain, or "
                "another chat template"
            )
        ends = [tail.index(token) + len(token) for token in self._known if token in tail]
        self._tails[self._has(tools)] = tail, tail[: min(ends, default=0)]
        return self._tails[self._has(tools)]

    @cached_property
    def _known(self) -> tuple[str, ...]:
        """The tokens that the tokenizer has as a whole, such as `<|im_end|>`."""
        known = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        return tuple(token for token in known | set(self.tokenizer.all_special_tokens) if token)


def after_prompt(prompt: str, content: str) -> str | None:
    """What of an answer follows a prompt that opens or closes the thinking itself.

    >>> after_prompt("<assistant><think>\\n", "<think>\\nHm.</think>Yes.")
    'Hm.</think>Yes.'
    >>> after_prompt("<assistant><think></think>", "<think>Hm.</think>Yes.")
    'Yes.'
    >>> after_prompt("<assistant><think>", "Yes.") is None
    True
    """
    _, closed, said = content.rpartition(_THOUGHT)
    if prompt.rstrip().endswith(_THINK) and closed:
        return content.removeprefix(_THINK).removeprefix("\n" if prompt.endswith("\n") else "")
    if prompt.rstrip().endswith(_THOUGHT) and closed:
        return said.lstrip("\n")
    return None
