'''Where messages come from: a terminal, with editing and history, or lines of any stream.

A message of several lines stands between two lines of """, or each line but the last ends in \\.
'''

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any, TextIO

from headstart.terminal import UsageError, is_utf8

QUOTES = '"""'


class Messages:
    """Reads one message after another.

    Args:
        read_line: the next line after a prompt (which it may leave out); raises EOFError at the
            end.
    """

    def __init__(self, read_line: Callable[[str], str]):
        self._read_line = read_line

    def next(self) -> str | None:
        """The next message that is not empty; None at the end.

        Raises:
            UsageError: it is no UTF-8 text; the one after it can be read.
        """
        with contextlib.suppress(EOFError):
            while True:
                message = self._message()
                if not is_utf8(message):
                    raise UsageError("the message is not valid UTF-8 text; write it again")
                if message.strip():
                    return message
        return None

    def _message(self) -> str:
        line = self._read_line("> ")
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip()[len(QUOTES) :])
        lines = [line]
        while lines[-1].endswith("\\") and "\n" not in lines[-1]:
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line(". "))
            except EOFError:
                break
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._read_line(". "))
            except EOFError:
                return "\n".join(lines).strip("\n")
        lines[-1] = lines[-1].rstrip()[: -len(QUOTES)]
        return "\n".join(lines).strip("\n")


def messages_of(stream: TextIO) -> Messages:
    """Messages of a stream: with editing and history where it is the terminal."""
    if not stream.isatty():

        def read_line(prompt: str) -> str:
            if not (line := stream.readline()):
                raise EOFError
            return line.rstrip("\r\n")

        return Messages(read_line)
    if importlib.util.find_spec("prompt_toolkit") is not None:
        return Messages(_toolkit())
    with contextlib.suppress(ImportError):  # there is none on Windows; with it `input` can edit
        import readline  # noqa: F401
    return Messages(input)


def _toolkit() -> Callable[[str], str]:
    """Lines by prompt_toolkit: what is pasted stays one message, Alt-Enter begins a new line."""
    import prompt_toolkit  # pyright: ignore[reportMissingImports]
    from prompt_toolkit.key_binding import KeyBindings  # pyright: ignore[reportMissingImports]

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: Any = prompt_toolkit.PromptSession(key_bindings=keys)

    def read_line(prompt: str) -> str:
        return session.prompt(prompt, prompt_continuation=". ")

    return read_line
