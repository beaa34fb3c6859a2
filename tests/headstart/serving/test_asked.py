"""Requests whose options would be ignored are refused; none that asks for nothing is."""

from typing import Any

import pytest

from headstart.serving.asked import check_asked

SAID = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "template", "said"),
    [
        ({"prompt": "a", "best_of": 3}, None, "best_of is 3"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, None, "leave logprobs or echo out"),
        ({"input": "a", "top_logprobs": 2}, "x", "top_logprobs is 2 and include has no .*; give"),
        ({"messages": SAID}, None, "/v1/completions"),
        ({"input": "a"}, None, "/v1/completions"),
        ({"messages": SAID, "tools": TOOLS}, "{{ messages }}", "no place for tools"),
        ({"messages": SAID, "reasoning_effort": "low"}, "x", "chat_template_kwargs"),
        ({"input": "a", "previous_response_id": "r1"}, "x", "whole conversation"),
        ({"prompt": "a", "max_tokens": -1}, None, "from 1"),
        ({"prompt": "a", "max_tokens": 1.5}, None, "max_tokens is 1.5; expected a whole number"),
        ({"prompt": "a", "suffix": "b"}, None, "put it into the prompt"),
        (
            {"prompt": "a", "frequency_penalty": 2.5},
            None,
            "expected a number from -2 to 2",
        ),
        (
            {"prompt": "a", "presence_penalty": True},
            None,
            "presence_penalty is True; ",
        ),
        ({"prompt": "a", "repetition_penalty": 0}, None, "expected a number above 0"),
        ({"messages": SAID, "modalities": ["text", "audio"]}, "x", "text alone is written"),
        ({"messages": SAID, "audio": {"voice": "alloy"}}, "x", "text alone is written"),
        ({"messages": SAID, "verbosity": "low"}, "x", "chat_template_kwargs"),
        ({"messages": SAID, "web_search_options": {}}, "x", "nothing is searched"),
        (
            {"messages": SAID, "tools": TOOLS, "parallel_tool_calls": False},
            "{{ tools }}",
            "parallel_tool_calls is False",
        ),
        ({"input": "a", "reasoning": {"effort": "low"}}, "x", "reasoning is .*chat_template"),
        ({"input": "a", "background": True}, "x", "background is True"),
        (
            {"prompt": "a", "stream_options": {"include_usage": True, "continuous_usage_stats": 1}},
            None,
            "stream_options is .*; give include_usage, true or false",
        ),
        ({"prompt": "a", "stream_options": {"include_usage": "no"}}, None, "give include_usage"),
        ({"input": "a", "truncation": "auto"}, "x", "shorten the prompt yourself"),
        ({"input": "a", "conversation": "c1"}, "x", "whole conversation"),
        ({"input": "a", "max_tool_calls": 2}, "x", "max_tool_calls is 2"),
        ({"input": "a", "text": {"verbosity": "low"}}, "x", "text is "),
        ({"messages": SAID, "chat_template_kwargs": {"chat_template": "x"}}, "x", "no setting of"),
        ({"messages": SAID, "chat_template_kwargs": {"tokenize": False}}, "x", "'tokenize'"),
        ({"prompt": "a", "temperature": float("inf")}, None, "temperature is inf"),
        ({"prompt": "a", "temperature": "hot"}, None, "'hot'; expected a number from 0"),
        ({"prompt": "a", "top_p": True}, None, "expected a number from 0 to 1"),
        ({"prompt": "a", "min_p": 2}, None, "min_p is 2; expected a number from 0 to 1"),
        ({"prompt": "a", "top_k": -2}, None, "top_k is -2; expected a whole number, 0 or -1 for"),
        ({"prompt": "a", "top_k": 2.5}, None, "top_k is 2.5"),
        ({"messages": SAID, "chat_template_kwargs": {"messages": []}}, "x", "'messages'"),
    ],
)
def test_refused(body: dict[str, Any], template: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_asked(body, template)


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({"prompt": "a", "n": 1, "best_of": 1, "echo": False, "suffix": ""}, None),
        (
            {"prompt": "a", "temperature": 0, "top_p": 0, "max_tokens": 1, "logit_bias": {"1": 2}},
            None,
        ),
        ({"messages": SAID, "tools": TOOLS, "tool_choice": "auto"}, "{{ tools }}"),
        ({"messages": SAID, "tools": [], "tool_choice": "none"}, "x"),
        ({"messages": SAID, "logit_bias": {"1": 2}, "presence_penalty": 0.0}, {"default": "x"}),
        ({"input": "a", "text": {"format": {"type": "text"}}}, "x"),
        ({"input": "a", "text": {"format": None}, "reasoning": {"effort": None}}, "x"),
        ({"input": "a", "include": ["reasoning.encrypted_content"]}, "x"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2}, "x"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, None),
        ({"input": "a", "stream_options": {"include_obfuscation": False}}, "x"),
        ({"input": "a", "background": False, "truncation": "disabled"}, "x"),
        ({"messages": SAID, "parallel_tool_calls": False, "modalities": ["text"]}, "x"),
        ({"messages": SAID, "tools": TOOLS, "parallel_tool_calls": True}, "{{ tools }}"),
        (
            {"messages": SAID, "tools": TOOLS, "tool_choice": "required"}
            | {"parallel_tool_calls": False},
            "{{ tools }}",
        ),
        ({"messages": SAID, "chat_template_kwargs": {"enable_thinking": False}}, "x"),
        ({"prompt": "a", "frequency_penalty": 0, "repetition_penalty": 1.3}, None),
        ({"prompt": "a", "top_k": -1, "min_p": 0.1}, None),
    ],
)
def test_taken(body: dict[str, Any], template: Any) -> None:
    check_asked(body, template)
