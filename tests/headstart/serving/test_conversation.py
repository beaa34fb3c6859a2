"""The items of /v1/responses as the messages that a chat template reads."""

from typing import Any

import pytest

from headstart.serving.conversation import messages_of
from headstart.serving.shapes import check_shapes


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"out {number}"}


def thought(text: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "r", "summary": [], "content": parts}


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def read(*items: dict[str, Any]) -> list[Any]:
    """Each message's role, text, thoughts and the ids of its calls."""
    body = {"input": list(items)}
    check_shapes(body)
    return [
        (
            each["role"], each["content"], each.get("reasoning_content"),
            [own["id"] for own in each.get("tool_calls", ())],
        )
        for each in messages_of(body)
    ]  # fmt: skip


def test_thoughts_belong_to_the_calls_that_follow_them() -> None:
    found = read(
        said("user", "a"), thought("first"), call(1), call(2), output(1), output(2),
        thought("second"), said("assistant", "b"), call(3), thought("third"), call(4),
    )  # fmt: skip
    assert found == [
        ("user", "a", None, []),
        ("assistant", "", "first", ["c1", "c2"]),
        ("tool", "out 1", None, []),
        ("tool", "out 2", None, []),
        ("assistant", "b", "second", ["c3"]),
        ("assistant", "", "third", ["c4"]),
    ]
    # Nobody said anything after these thoughts; they are none of a later answer.
    found = read(said("user", "a"), thought("lost"), said("user", "b"), said("assistant", "c"))
    assert [each[2] for each in found] == [None, None, None]


@pytest.mark.parametrize("first", [call(1), thought("so"), {"type": "message", **said("user", "")}])
def test_a_conversation_may_begin_with_any_item(first: dict[str, Any]) -> None:
    found = read(first, said("assistant", "b"))
    assert [each[0] for each in found][-1] == "assistant" and found[-1][1] == "b"
    assert read({"type": "input_text", "text": "a"})[0][0] == "user"
    with pytest.raises(ValueError, match=r"input\[0\] is of type 'item_reference'"):
        read({"type": "item_reference", "id": "x"})
    with pytest.raises(ValueError, match=r"input\[0\].content is 'a'; expected a list of parts"):
        read({"type": "reasoning", "content": "a"})
    with pytest.raises(ValueError, match=r"input\[0\].type is \[\]; expected a text"):
        read({"type": [], **said("user", "a")})
    with pytest.raises(ValueError, match="expected at least one message beside the thoughts"):
        read(thought("a"))


def test_instructions_stand_before_a_system_message() -> None:
    parts = [{"type": "input_text", "text": text} for text in ("So", "on")]
    for content, expected in (("So.", "Be.\n\nSo."), (parts, "Be.\n\nSo on")):
        given = [{"role": "system", "content": content}, said("user", "a")]
        first, second = messages_of({"input": given, "instructions": "Be."})
        assert first == said("system", expected) and second["role"] == "user"
