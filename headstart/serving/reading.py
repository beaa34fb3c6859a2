"""What of an answer is text, what thoughts, and what calls of tools, by the response template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    _normalize_tool_call,
    get_response_template,
)
from transformers.utils.chat_parsing import ResponseParser

from .tagged_calls import are_tagged, as_ensured, with_types

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""How response templates name what a model thinks."""

_CALLS = "tool_calls"


class Read(NamedTuple):
    """The parts of an answer, its text being that on all sides of thoughts and calls."""

    text: str
    thoughts: str
    calls: Sequence[ToolCall]

    @classmethod
    def of(cls, items: Sequence[Any]) -> Read:
        """Those of what it was written in."""
        calls = [item for item in items if isinstance(item, ToolCall)]
        thoughts = [item for item in items if isinstance(item, ReasoningText)]
        said = [item for item in items if not isinstance(item, ToolCall | ReasoningText)]
        return cls("".join(said), "".join(thoughts), calls)


class Reader(ResponseParser):
    """Reads an answer of any text: what begins as a call and is none, or is cut, is text.

    That of transformers raises an error then, and the answer would be lost.
    """

    _begun = 0  # where the present region begins in the buffer, with its mark
    _before = 0  # characters of the buffer before the answer

    def __init__(self, *given: Any, **options: Any):
        # Where text and thoughts begin and end in the buffer.
        self._text, self._thoughts = list[tuple[int, int]](), list[tuple[int, int]]()
        super().__init__(*given, **options)
        self._before = len(self._buffer)

    @property
    def position(self) -> int:
        """Characters of the answer of which it is known whether they are text."""
        return self._pos - self._before

    def is_text(self, at: int) -> bool:
        """Whether a character of the answer is text, rather than of thoughts, calls or marks."""
        return self._is_in(self._text, at)

    def is_thought(self, at: int) -> bool:
        """Whether a character of the answer is of thoughts."""
        return self._is_in(self._thoughts, at)

    def _is_in(self, parts: Sequence[tuple[int, int]], at: int) -> bool:
        return any(begin <= at + self._before < end for begin, end in parts)

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        events = list[dict[str, Any]]()
        self._process(events, eos=True)  # fields that the template expects may be missing
        return self._output, events

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        if self._current == "content":
            _append(self._text, self._pos, self._pos + len(text))
        elif self._current in THOUGHTS:
            _append(self._thoughts, self._pos, self._pos + len(text))
        super()._accumulate(events, text)

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        self._begun = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        known = len(events)
        try:
            if self._current == _CALLS and self._is_cut():
                raise ValueError("a call without its end")
            super()._close_current(events)
            events[known:] = [each for event in events[known:] for each in _checked(event)]
        except Exception:  # the target may have written anything
            del events[known:]
            text = self._buffer[self._begun : self._pos]
            _append(self._text, self._begun, self._pos)
            field = self._spec.fields.get(self._implicit_name or "")
            if field is not None and field.close_re is not None:
                text = field.close_re.split(text, maxsplit=1)[0]  # without the end token
            events.append({"type": "region_chunk", "field": "content", "text": text})
            self._reset_to_implicit()

    def _is_cut(self) -> bool:
        """Whether a call between tags has no end; it would be read without its last arguments."""
        field = self._spec.fields[_CALLS]
        if field.content != "xml-inline" or field.close_re is None:
            return False
        ends = (found.end() for found in field.close_re.finditer(self._buffer, self._begun))
        return self._pos not in ends


def _append(parts: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a part, as one with the last if it follows it: else a long text would have thousands."""
    if parts and parts[-1][1] == begin:
        begin, _ = parts.pop()
    parts.append((begin, end))


def _checked(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The event of a region's end, one for each call if it is of calls."""
    if event.get("field") != _CALLS:
        return [event]
    value = event["value"]
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(_normalize_tool_call(each).name, str) for each in calls):
        raise ValueError("no call")
    return [event | {"value": each} for each in calls]


def reader_of(
    processor: Any, model: Any, prompt: Any, tools: Sequence[dict[str, Any]], ensured: bool
) -> Reader | None:
    """Reads the answer to a prompt [1, P]; None where it is known of no template how it is written.

    Args:
        tools: of the request; the arguments of calls get the types that these have.
        ensured: whether the answer has the form of calls, see `form_of_calls`.
    """
    template = get_response_template(processor, model)
    if template is None:
        return None
    if ensured and are_tagged(template.get("fields", {}).get(_CALLS, {})):
        template = as_ensured(template)
    return Reader(template, prefix=processor.decode(prompt[0]), tools=with_types(tools))
