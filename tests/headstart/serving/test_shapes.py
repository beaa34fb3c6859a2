"""Fields of a wrong type are named; what the protocol allows is taken."""

from typing import Any

import pytest

from headstart.serving.shapes import biases_of, check_shapes, stops_of, without_nulls

USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL: dict[str, Any] = CALL | {"function": {"name": "f", "arguments": "{a"}}
LISTED = CALL | {"function": {"name": "f", "arguments": "[1]"}}
PICTURE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": "hi"}, "messages is 'hi'; expected a list of messages"),
        ({"messages": []}, "expected at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi'; expected an object"),
        ({"messages": [USER, {"content": "x"}]}, r"messages\[1\].role is None; expected a text"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is None; expected a text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is 5; expected a text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"content\[0\] is 'x'"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "type 'image_url'.*text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is None"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls is 5"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function has name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]},
            r"tool_calls\[0\].function.arguments is '{a'; expected a JSON object",
        ),
        (
            {"input": [USER, {"type": "function_call", "call_id": "1", **BAD_CALL["function"]}]},
            r"input\[1\].arguments is '{a'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [LISTED]}]},
            "is '.1.'; expected a JSON",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "NaN"}]},
            r"input\[0\].arguments is 'NaN'; expected a JSON object",
        ),
        ({"prompt": ["a", "b"]}, "prompt is .*; expected a text"),
        ({"prompt": "a", "stop": 5}, "stop is 5; expected a text, or a list of texts"),
        ({"prompt": "a", "stop": ["b", 5]}, "expected a text, or a list"),
        ({"prompt": "a", "stop": ["b"] * 65}, "stop has 65 texts; expected at most 64"),
        ({"prompt": "a", "seed": [1]}, "seed is .1.; expected a whole number"),
        ({"prompt": "a", "seed": 1 << 63}, "at most 64 bits"),
        (
            {"messages": [], "parallel_tool_calls": "no"},
            "parallel_tool_calls is 'no'; expected true",
        ),
        ({"prompt": "a", "stream": "yes"}, "stream is 'yes'; expected true or false"),
        ({"messages": [USER], "logit_bias": []}, "logit_bias is .*; expected an object"),
        ({"messages": [USER], "logit_bias": {"x": 1}}, "token ids as its keys"),
        ({"messages": [USER], "logit_bias": {"5": "x"}}, "logit_bias of 5 is 'x'"),
        ({"messages": [USER], "chat_template_kwargs": "x"}, "chat_template_kwargs is 'x'"),
        ({"messages": [USER], "tools": "x"}, "tools is 'x'; expected a list of functions"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"messages": [USER], "tools": [{"type": "function", "function": "f"}]}, "with a name"),
        ({"input": "a", "tools": [{"type": "function", "name": 5}]}, "a function with a name"),
        (
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": "{}"}]},
            r"tools\[0\].parameters is '{}'; expected a JSON schema",
        ),
        ({"input": 5}, "input is 5; expected a text, or a list of messages"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "type 'input_image'"),
        ({"input": [USER, {"type": "computer_call"}]}, r"input\[1\] is of type 'computer_call'"),
        ({"input": [USER, {"type": "function_call"}]}, r"input\[1\].call_id is None"),
        ({"input": "a", "text": "x"}, "text is 'x'; expected an object"),
        ({"input": "a", "reasoning": "low"}, "reasoning is 'low'; expected an object"),
    ],
)
def test_a_wrong_type_is_named(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_shapes(body)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"input": "a"},
        {"input": [{"type": "input_text", "text": "a"}]},
        {
            "input": [
                {"type": "message", **USER},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ]
        },
        {"prompt": "a", "seed": -1, "stop": [], "stream": False},
        {"prompt": "a", "stop": ["b"] * 64},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_what_the_protocol_allows_is_taken(body: dict[str, Any]) -> None:
    check_shapes(body)


def test_null_is_what_was_left_out() -> None:
    body = {"stop": None, "messages": [{**USER, "tool_calls": None}], "seed": 0}
    assert without_nulls(body) == {"messages": [USER], "seed": 0}


@pytest.mark.parametrize("given", [{}, {"stop": ""}, {"stop": []}, {"stop": [""]}])
def test_an_empty_stop_string_stops_nothing(given: dict[str, Any]) -> None:
    assert stops_of(given) == [] and stops_of({"stop": ["a", "b"]}) == ["a", "b"]


def test_biases_are_numbers_of_python() -> None:
    found = biases_of({"logit_bias": {"5": 100, "7": -0.5}})
    assert found == {"5": 100.0, "7": -0.5} and isinstance(found["5"], float)
