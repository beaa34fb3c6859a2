"""The `input` of /v1/responses as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """A request as messages; its instructions stand before a system message, if it has one.

    Thoughts belong to the message or the calls of the assistant that follow them. Calls follow the
    text that the assistant wrote before them, if it did.

    >>> messages_of({"instructions": "Be kind.", "input": "Hi"})
    [{'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'Hi'}]
    """
    given = body["input"]
    if isinstance(given, str) or are_parts(given):
        found = [{"role": "user", "content": given}]
    else:
        found = _messages(given)
    if instructions := body.get("instructions"):
        if found[0]["role"] == "system":
            instructions = f"{instructions}\n\n{_text(found.pop(0)['content'])}"
        found.insert(0, {"role": "system", "content": instructions})
    return found


def are_parts(given: Sequence[Any]) -> bool:
    """Whether they are parts of one message, rather than messages, thoughts and calls."""
    first = given[0]
    return isinstance(first, dict) and "role" not in first and first.get("type") not in _ITEMS


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    found, thoughts = list[Message](), ""
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            thoughts += "".join(part["text"] for part in item.get("content") or ())
            continue
        if kind == "function_call_output":
            answer = {"tool_call_id": item["call_id"], "content": item["output"]}
            found.append({"role": "tool", **answer})
        elif kind != "function_call":
            found.append({"role": item["role"], "content": item["content"]})
        elif thoughts or not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        if thoughts and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return found


def _text(content: Any) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
