"""A chat: its turns, what of them fits into the context, and the decoding of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headstart.heads.core import counted, trained_context
from headstart.infer import Recorder, Speculator
from headstart.infer.generate_options import GenerateOptions
from headstart.show.figures import Figures
from headstart.terminal import UsageError
from headstart.train.data.documents import Message, plain_chat, render_chat
from headstart.train.data.tokenising import prompt_tokens

from .streamer import ChatStreamer, Stopped

NEW_TOKENS = 512
"""Tokens of an answer at most, where no other number is given."""

_NEXT = "\nUser:"  # where a model without a chat template would go on with the user's next message


@dataclass
class Turn:
    """A message and its answer.

    Attributes:
        ids: the answer's tokens, as they were written.
        prompt: tokens before them.
        plain: whether they were decoded without a drafter; stopped: whether the user stopped them.
    """

    message: str
    answer: str
    ids: list[int]
    prompt: int
    figures: Figures
    plain: bool
    stopped: bool


class Session:
    """Turns of one chat with a target, with its drafter or without.

    The answer to a message depends on the turns before it as text. The oldest turns are left out
    where the context has no room for all of them and an answer.

    Args:
        system: the first message, if any.
        max_new_tokens: of an answer; by default NEW_TOKENS, or what the context has room for.
        sampling: options of `generate`.
        recorder: takes each answer that was not stopped, with the turns before it.

    Attributes:
        turns: of the chat; first: the number of the oldest one that the target still reads.
        answered: those, and what `again` and `reset` have taken back.
        plain: whether the next answer is decoded without the drafter.
        context: tokens that the target was made for, None without an end.
        templated: whether the tokenizer has a chat template; without one turns are written as
            `User: … Assistant: …`, and an answer ends where the user's next turn would begin.
    """

    def __init__(
        self,
        speculator: Speculator,
        system: str | None = None,
        max_new_tokens: int | None = None,
        sampling: dict[str, Any] | None = None,
        recorder: Recorder | None = None,
    ):
        self.speculator, self.tokenizer = speculator, speculator.tokenizer
        self.turns, self.answered = list[Turn](), list[Turn]()
        self.first, self.plain = 0, speculator.drafter is None
        self.context = trained_context(speculator.model)
        self.templated = bool(getattr(self.tokenizer, "chat_template", None))
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._new, self._sampling = max_new_tokens, sampling or {"do_sample": False}
        self._without: Speculator | None = None
        self._recorder = recorder

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter to decode with."""
        return self.speculator.drafter is not None

    def ask(self, message: str, show: Callable[[str | None], ChatStreamer]) -> Turn:
        """Answer a message and keep the turn.

        Args:
            show: the streamer of an answer, which ends at the given text, if any.

        Raises:
            UsageError: the message alone is too long for the context.
        """
        ids, new = self._fit(message)
        stopped = False
        with show(None if self.templated else _NEXT) as streamer:
            try:
                self._decoder().generate(
                    ids, max_new_tokens=new, streamer=streamer, **self._sampling
                )
            except Stopped:
                stopped = not streamer.ended
        answer = str(streamer.text)
        answer = answer if self.templated else answer.strip()
        counts = ids.shape[1], streamer.figures, self.plain, stopped
        turn = Turn(message, answer, streamer.answer_ids, *counts)
        if self._recorder is not None and not stopped:
            asked = [*self.messages(self.first), {"role": "user", "content": message}]
            options = {**self._sampling, "max_new_tokens": new}
            setting = GenerateOptions(options, self.speculator.model.generation_config).get  # type: ignore[arg-type]
            tau = streamer.figures.tau
            self._recorder.add(ids[0].tolist(), turn.ids, setting, tau, asked)
        self.turns.append(turn)
        self.answered.append(turn)
        return turn

    def again(self) -> str | None:
        """Take the last turn back and return its message; None where there is none."""
        if len(self.turns) <= self.first:
            return None
        return self.turns.pop().message

    def reset(self) -> None:
        """Begin a new chat."""
        self.turns, self.first = [], 0

    def messages(self, first: int = 0, answered: bool = False) -> list[Message]:
        """The chat from a turn on; of its `answered` turns alone, as readers of chats want it."""
        found = list(self._system)
        for turn in self.turns[first:]:
            if answered and not turn.answer.strip():
                continue
            found.append({"role": "user", "content": turn.message})
            found.append({"role": "assistant", "content": turn.answer})
        return found

    def _fit(self, message: str) -> tuple[Any, int]:
        """The prompt's ids [1, P] with as many turns as fit, and how many tokens may follow."""
        asked, context = self._new or NEW_TOKENS, self.context
        first = self.first
        while True:
            ids = self._encode(self.messages(first), message)
            if context is None:
                break
            room, wanted = context - ids.shape[1], min(asked, context // 2)
            if room >= wanted or (first == len(self.turns) and room > 0):
                asked = min(asked, room)
                break
            if first == len(self.turns):
                raise UsageError(
                    f"the message and what belongs to it have {counted(ids.shape[1], 'token')}, "
                    f"and the target was made for {context} with the answer; shorten the message"
                )
            first += 1
        self.first = first
        return ids.to(self.speculator.device), asked

    def _encode(self, before: list[Message], message: str) -> Any:
        messages = [*before, {"role": "user", "content": message}]
        tokenizer: Any = self.tokenizer
        text = render_chat(tokenizer, messages) if self.templated else plain_chat(messages)
        found = prompt_tokens(tokenizer, text, not self.templated)
        if found.input_ids.shape[1] == 0:
            raise UsageError("the message has no token in this model's vocabulary; write another")
        return found.input_ids

    def _decoder(self) -> Speculator:
        if not self.plain or not self.drafts:
            return self.speculator
        if self._without is None:
            own = self.speculator
            self._without = Speculator(
                own.model, tokenizer=self.tokenizer, compile=own.target.compile
            )
        return self._without
