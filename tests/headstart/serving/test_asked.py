"""Requests whose options would be ignored are refused; none that asks for nothing is."""

from typing import Any

import pytest

from headstart.asked import check_asked

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "template", "said"),
    [
        ({"prompt": "a", "best_of": 3}, None, "best_of is 3"),
        ({"prompt": "a", "echo": True}, None, "put the prompt before the answer"),
        ({"prompt": "a", "logprobs": 0}, None, "no probabilities are returned"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, None, "for chats alone"),
        ({"messages": []}, None, "/v1/completions"),
        ({"input": "a"}, None, "/v1/completions"),
        ({"messages": [], "tools": TOOLS}, "{{ messages }}", "no place for tools"),
        ({"messages": [], "tools": TOOLS, "tool_choice": "required"}, "{{ tools }}", "tool_choice"),
        ({"messages": [], "reasoning_effort": "low"}, "x", "chat_template_kwargs"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "x", "describe the form"),
        ({"input": "a", "previous_response_id": "r1"}, "x", "whole conversation"),
        ({"prompt": "a", "max_tokens": -1}, None, "from 1"),
        ({"prompt": "a", "temperature": "hot"}, None, "'hot'; expected a number from 0"),
        ({"prompt": "a", "top_p": True}, None, "expected a number from 0 to 1"),
    ],
)
def test_refused(body: dict[str, Any], template: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_asked(body, template)


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({"prompt": "a", "n": 1, "best_of": 1, "echo": False, "logprobs": None}, None),
        ({"prompt": "a", "temperature": 0, "top_p": 0, "max_tokens": 1, "logit_bias": {}}, None),
        ({"messages": [], "tools": TOOLS, "tool_choice": "auto"}, "{{ tools }}"),
        ({"messages": [], "tools": [], "tool_choice": "none"}, "x"),
        ({"messages": [], "logit_bias": {"1": 2}, "presence_penalty": 0.0}, {"default": "x"}),
        ({"input": "a", "text": {"format": {"type": "text"}}}, "x"),
    ],
)
def test_taken(body: dict[str, Any], template: Any) -> None:
    check_asked(body, template)
