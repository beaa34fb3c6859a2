"""The shapes of a request's fields: what has another one is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstart.terminal import is_utf8
from headstart.train.data.parsing import TEXT_PARTS
from headstart.train.data.tool_calls import with_objects

from .conversation import are_parts

_FIELDS: dict[str, tuple[type, str]] = {
    "prompt": (str, "a text"),
    "messages": (list, "a list of messages"),
    "instructions": (str, "a text"),
    "stream": (bool, "true or false"),
    "echo": (bool, "true or false"),
    "stream_options": (dict, "an object"),
    "parallel_tool_calls": (bool, "true or false"),
    "seed": (int, "a whole number"),
    "logit_bias": (dict, "an object with a number for each token id"),
    "chat_template_kwargs": (dict, "an object"),
    "tools": (list, "a list of functions"),
    "text": (dict, "an object"),
    "reasoning": (dict, "an object"),
    "include": (list, "a list of texts"),
    "generation_config": (str, "a JSON object, written as a text"),
}
_CALLS = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
}  # the texts of these items of `input`
_STOPS = 64  # stop strings of a request, at most: each is looked for after every token
_SHOWN = 60  # characters of a wrong value that a message repeats
_SEEDS = 1 << 63
_LARGEST = 1e38  # about the largest float32


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request without what is null, in itself and its messages; the protocol sees no difference.

    >>> without_nulls({"prompt": "Hi", "stop": None})
    {'prompt': 'Hi'}
    """
    found = {name: value for name, value in body.items() if value is not None}
    if isinstance(messages := found.get("messages"), list):
        found["messages"] = [
            without_nulls(each) if isinstance(each, dict) else each for each in messages
        ]
    return found


def with_known_roles(body: Mapping[str, Any], template: Any) -> dict[str, Any]:
    """A request whose developer messages are system messages, if the template has only those.

    The protocol means the same by both, and many templates leave out roles that they do not know.

    >>> with_known_roles({"messages": [{"role": "developer", "content": "Hi"}]}, "{{ messages }}")
    {'messages': [{'role': 'system', 'content': 'Hi'}]}
    """
    found = dict(body)
    for name in ("messages", "input") if "developer" not in str(template) else ():
        if isinstance(given := body.get(name), list):
            found[name] = [
                each | {"role": "system"}
                if isinstance(each, dict) and each.get("role") == "developer"
                else each
                for each in given
            ]
    return found


def check_shapes(body: Mapping[str, Any]) -> None:
    """Refuse fields of a wrong type, and messages without a text.

    Args:
        body: a request `without_nulls`.

    Raises:
        ValueError: the name of the field, what was found, and what was expected.

    >>> check_shapes({"messages": "Hi"})
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: messages is 'Hi'; expected a list of messages
    """
    for name, (kind, wanted) in _FIELDS.items():
        value = body.get(name)
        if value is not None and (type(value) is not kind):
            raise wrong(name, value, wanted)
    if not -_SEEDS <= body.get("seed", 0) < _SEEDS:
        raise wrong("seed", body["seed"], "a whole number of at most 64 bits")
    stops_of(body)
    biases_of(body)
    for number, tool in enumerate(body.get("tools", ())):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong(f"tools[{number}]", tool, "an object of the type 'function'")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{number}]", tool, "a function with a name")
        schema = function.get("parameters")
        if not isinstance(schema, dict | None):
            raise wrong(f"tools[{number}].parameters", schema, "a JSON schema, an object")
    if "messages" in body:
        if not body["messages"]:
            raise wrong("messages", [], "at least one message")
        for number, message in enumerate(body["messages"]):
            _check_message(message, f"messages[{number}]")
    if "input" in body:
        _check_input(body["input"])


def stops_of(body: Mapping[str, Any]) -> list[str]:
    """The stop strings of a request; empty ones stop nothing.

    Raises:
        ValueError: they are no texts, or too many.

    >>> stops_of({"stop": "END"}), stops_of({"stop": ["a", ""]}), stops_of({})
    (['END'], ['a'], [])
    """
    given = body.get("stop", [])
    check_stops(given, "stop")
    return [each for each in ([given] if isinstance(given, str) else given) if each]


def check_stops(given: Any, name: str) -> None:
    """Refuse stop strings that are no texts, or too many.

    Raises:
        ValueError: what was found in the field `name`.
    """
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise wrong(name, given, "a text, or a list of texts")
    if len(found) > _STOPS:
        raise Refused(f"{name} has {len(found):,} texts; expected at most {_STOPS}", name)


def check_text(body: Mapping[str, Any]) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and no tokenizer reads.

    Raises:
        ValueError: the name of the field that holds one.

    >>> check_text({"prompt": "a\\ud800"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: prompt holds half of a surrogate pair, ...
    """
    for name, value in body.items():
        if not is_utf8(name):
            raise ValueError(f"the field {shown(name)} is no text; leave it out")
        if not is_utf8(json.dumps(value, ensure_ascii=False)):
            raise Refused(
                f"{name} holds half of a surrogate pair, which is no text; send whole characters",
                name,
            )


def biases_of(body: Mapping[str, Any]) -> dict[str, float]:
    """What `logit_bias` adds to the scores of token ids.

    Raises:
        ValueError: a key is no token id, or a value no number.

    >>> biases_of({"logit_bias": {"5": -100}})
    {'5': -100.0}
    """
    found = {}
    for key, value in body.get("logit_bias", {}).items():
        if not (key.isascii() and key.isdigit()):
            raise wrong("logit_bias", key, "token ids as its keys")
        if not is_number(value):
            raise wrong(f"logit_bias of {key}", value, "a number")
        found[key] = float(value)
    return found


def check_ids(name: str, ids: list[Any], vocabulary: int) -> None:
    """Refuse what are no token ids of a target that has so many.

    Raises:
        ValueError: the first one that is none.
    """
    for each in ids:
        if type(each) is not int or not 0 <= each < vocabulary:
            raise wrong(name, each, f"token ids below {vocabulary}")


def is_number(value: Any) -> bool:
    """Whether a value is a number, which true, false, NaN and infinities are not."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < _LARGEST


class Refused(ValueError):
    """A request that is not answered as it is.

    Attributes:
        param: the field that is at fault, `messages[0].role` say; code: the protocol's word for it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


def wrong(name: str, value: Any, wanted: str) -> Refused:
    """The error of a field that has another value than was expected."""
    at = name.partition(" ")[0]
    return Refused(f"{name} is {shown(value)}; expected {wanted}", at, "invalid_value")


def shown(value: Any) -> str:
    """A value, as far as an error repeats it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _check_message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise wrong(at, message, "an object with role and content")
    if not isinstance(message.get("role"), str):
        raise wrong(f"{at}.role", message.get("role"), "a text, such as 'user'")
    calls = message.get("tool_calls")
    if calls is None or message.get("content") is not None:
        _check_content(message.get("content"), f"{at}.content")
    if not isinstance(calls, list | None):
        raise wrong(f"{at}.tool_calls", calls, "a list of calls")
    for number, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= set(function):
            raise wrong(
                f"{at}.tool_calls[{number}]", call, "an object whose function has name, arguments"
            )
        _check_arguments(function["arguments"], f"{at}.tool_calls[{number}].function.arguments")


def _check_arguments(given: Any, at: str) -> None:
    [read] = with_objects([{"arguments": given}])
    if not isinstance(read["arguments"], dict):
        raise wrong(at, given, "a JSON object, written as a text")


def _check_content(content: Any, at: str, kinds: frozenset[str] = TEXT_PARTS) -> None:
    """Refuse what is neither a text nor a list of parts that hold text."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise wrong(at, content, "a text, or a list of parts")
    for number, part in enumerate(content):
        here = f"{at}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong(here, part, "an object with a type, such as 'text'")
        if kind not in kinds:
            raise Refused(
                f"{here} is of type {shown(kind)}, which this server cannot read; send text alone",
                here,
                "unsupported_value",
            )
        if not isinstance(part.get("text"), str):
            raise wrong(f"{here}.text", part.get("text"), "a text")


def _check_input(given: Any) -> None:
    """Refuse what /v1/responses cannot read: other than a text, messages, parts, or calls."""
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "a text, or a list of messages")
    if are_parts(given):
        _check_content(given, "input")
        return
    for number, item in enumerate(given):
        at, kind = f"input[{number}]", item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str | None):
            raise wrong(f"{at}.type", kind, "a text, such as 'message'")
        if kind == "reasoning":
            thoughts = item.get("content") or []
            if isinstance(thoughts, str):
                raise wrong(f"{at}.content", thoughts, "a list of parts")
            _check_content(thoughts, f"{at}.content", frozenset({"reasoning_text"}))
        elif kind in _CALLS:
            for name in _CALLS[kind]:
                if not isinstance(item.get(name), str):
                    raise wrong(f"{at}.{name}", item.get(name), "a text")
            if kind == "function_call":
                _check_arguments(item["arguments"], f"{at}.arguments")
            if kind == "function_call_output":
                _check_content(item.get("output"), f"{at}.output")
        elif kind in (None, "message"):
            _check_message(item, at)
        else:
            raise Refused(
                f"{at} is of type {shown(kind)}, which this server cannot read; send messages",
                at,
                "unsupported_value",
            )
    if all(item.get("type") == "reasoning" for item in given):
        raise wrong("input", given, "at least one message beside the thoughts")
