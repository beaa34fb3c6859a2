"""The dialogue with the user: messages, commands, and what is said of the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from headstart.heads.core import counted
from headstart.show.figures import rate
from headstart.terminal import UsageError, one_line, visible

from .lines import Messages
from .session import Session, Turn
from .streamer import ChatStreamer, ctrl_c

HELP = '''\
/plain       answer without the drafter: the same text, slower
/fast        answer with the drafter
/again       answer the last message once more, for example after /plain
/stats       tokens per second, τ and acceptance, with the drafter and without
/reset       begin a new chat
/save FILE   write the chat to a .jsonl FILE, for generate, bench and train
/help        this list
Ctrl-C stops an answer, Ctrl-D ends the chat. Several lines: """ before and
after them, or a \\ at the end of each. A message that begins with / needs a
space before it.'''


class Dialogue:
    """Reads messages and commands until they end.

    Args:
        out: takes answers and what commands were asked for; errors: everything else.
        show: whether drafted tokens are coloured.
    """

    def __init__(
        self,
        session: Session,
        messages: Messages,
        out: TextIO | None = None,
        errors: TextIO | None = None,
        show: bool = False,
    ):
        self.session, self._messages, self._show = session, messages, show
        self._out, self._errors = out or sys.stdout, errors or sys.stderr
        self._commands: dict[str, Callable[[str], None]] = {
            "/plain": lambda _: self._switch(True),
            "/fast": lambda _: self._switch(False),
            "/again": self._again,
            "/stats": self._stats,
            "/reset": self._reset,
            "/save": self._save,
            "/help": lambda _: self._print(HELP),
        }

    def run(self) -> None:
        """Until the messages end, or Ctrl-D is pressed."""
        while True:
            try:
                message = self._messages.next()
                if message is None:
                    return
                self._take(message)
            except KeyboardInterrupt:
                self._say("(interrupted; Ctrl-D ends the chat)")
            except (ValueError, OSError) as error:
                self._say(f"error: {one_line(error)}")

    def _take(self, message: str) -> None:
        if not message.startswith("/"):
            self._answer(message.strip())
            return
        name, _, rest = message.strip().partition(" ")
        if name not in self._commands:
            raise UsageError(f"no command {visible(name)[:40]}; /help lists them")
        self._commands[name](rest.strip())

    def _answer(self, message: str) -> None:
        dropped = self.session.first
        with ctrl_c() as pressed:

            def show(end: str | None) -> ChatStreamer:
                if (more := self.session.first - dropped) > 0:
                    self._say(f"({_oldest(more)} left out: the context is full)")
                tokenizer = self.session.tokenizer
                return ChatStreamer(tokenizer, pressed, end, out=self._out, coloured=self._show)

            turn = self.session.ask(message, show)
        said = ["stopped"] if turn.stopped else []
        said += [] if self._coloured else [turn.figures.line()]
        said += ["plain"] if turn.plain and self.session.drafts else []
        if said:
            self._say(f"({' · '.join(said)})")
        if self._out.isatty():
            self._print("")

    @property
    def _coloured(self) -> bool:
        """Whether the figures stand below the text already."""
        return self._show and self._out.isatty()

    def _switch(self, plain: bool) -> None:
        if not self.session.drafts:
            raise UsageError(
                "nothing drafts here; start the chat with --drafter, and with --tree where the "
                "drafter's plan is plain decoding"
            )
        self.session.plain = plain
        how = "without the drafter" if plain else "with the drafter"
        self._say(f"(answers are decoded {how} from now on; /again compares)")

    def _again(self, _: str) -> None:
        message = self.session.again()
        if message is None:
            raise UsageError("there is no message to answer again; write one")
        self._answer(message)

    def _reset(self, _: str) -> None:
        self.session.reset()
        self._say("(a new chat)")

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save without a file; write /save FILE.jsonl")
        path = Path(name).expanduser()
        if path.suffix != ".jsonl":
            raise UsageError(f"{name} would not be read as a chat; write /save FILE.jsonl")
        messages = self.session.messages(answered=True)
        if not (turns := len(messages) // 2):
            raise UsageError("there is no answer to save yet; write a message")
        document = {"messages": messages}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(document, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise UsageError(f"{name} is there already; choose another name") from None
        self._say(f"({counted(turns, 'turn')} written to {name})")

    def _stats(self, _: str) -> None:
        session = self.session
        if not session.answered:
            raise UsageError("there is no answer yet; write a message")
        last = session.answered[-1]
        rows = [("last answer", last.figures.line())]
        if shares := last.figures.acceptance:
            each = "  ".join(f"{depth} {share:.0%}" for depth, share in enumerate(shares, 1))
            rows.append(("  accepted at depth", each))
        for plain, name in ((False, "with the drafter"), (True, "plain")):
            turns = [turn for turn in session.answered if turn.plain == plain]
            if turns:
                rows.append((name, _summed(turns)))
        used, context = last.prompt + len(last.ids), session.context
        size = f" of {context:,}" if context else ""
        left = f"; {_oldest(session.first)} left out" if session.first else ""
        rows.append(("context", f"{used:,}{size} tokens{left}"))
        for label, value in rows:
            self._print(f"{label:<21}{value}")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _say(self, text: str) -> None:
        print(text, file=self._errors, flush=True)


def _oldest(turns: int) -> str:
    """So many turns, as the beginning of a sentence that says what is done with them."""
    return "the oldest turn is" if turns == 1 else f"the oldest {turns} turns are"


def _summed(turns: list[Turn]) -> str:
    """Answers, tokens, tokens a second and τ of some turns."""
    figures = [turn.figures for turn in turns]
    tokens, rounds = sum(f.tokens for f in figures), sum(f.rounds for f in figures)
    after = sum(f.tokens - 1 for f in figures if f.rounds)  # the prefill gives the first one
    seconds = sum(f.seconds for f in figures)
    said = f"{counted(len(turns), 'answer')}, {counted(tokens, 'token')}"
    if rounds and seconds:
        said += f", {rate(after / seconds)}, τ {after / rounds:.2f}"
    return said
