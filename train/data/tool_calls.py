"""Calls of tools, as a chat template reads them."""

from __future__ import annotations

import json
from typing import Any


def with_objects(calls: Any) -> Any:
    """Calls of tools whose `arguments` are objects, where they were strings of JSON that hold one.

    OpenAI's protocol writes a string. Templates apply `tojson`, and so would encode it twice: vLLM
    and `transformers serve` parse it before they render a chat. An empty string, which servers
    write for a call without arguments, is an empty object, as for vLLM. All else stays as it is.

    Args:
        calls: a message's `tool_calls`, of any shape.

    >>> with_objects([{"function": {"name": "add", "arguments": '{"a": 1}'}}])
    [{'function': {'name': 'add', 'arguments': {'a': 1}}}]
    >>> with_objects([{"name": "say", "arguments": "hello"}])
    [{'name': 'say', 'arguments': 'hello'}]
    """
    return [_with_object(call) for call in calls] if isinstance(calls, list) else calls


def renamed(calls: Any) -> Any:
    """Calls of tools by other names, by which a template shows whether it writes them.

    >>> renamed([{"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}])
    [{'id': '1', 'function': {'name': 'add_', 'arguments': {'a': 1}}}]
    """
    return [_renamed(call) for call in calls] if isinstance(calls, list) else calls


def _renamed(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _renamed(call["function"])}
    return call | {"name": f"{call['name']}_"} if "name" in call else call


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_object(call["function"])}
    arguments = call.get("arguments")
    return call | {"arguments": _object(arguments)} if isinstance(arguments, str) else call


def _object(text: str) -> Any:
    """The object that a string of JSON holds; the string where it holds none."""
    try:
        found = json.loads(text, parse_constant=_refuse) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
