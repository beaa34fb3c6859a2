"""Answers that must call tools."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Batcher
from tests.support.chats import TOOLS
from tests.support.served import served, speaker

pytest.importorskip("llguidance")
if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

from headstart.serving.calls import form_of_calls
from headstart.serving.shapes import Refused

CALLS = {
    "open_pattern": r"\s*<think>",  # a token of its own
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
FIELDS: dict[str, Any] = {
    "tool_calls": CALLS,
    "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
}
TEMPLATE: dict[str, Any] = {"start_anchor": "<|im_start|>assistant\n", "fields": FIELDS}
PARAMETERS = {
    "$defs": {"size": {"enum": ["small", "large"]}},
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
}
F = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": 'g "x"'}}
BODY: dict[str, Any] = {"model": "talker", "max_tokens": 120, "temperature": 1, "seed": 1}
CHAT = BODY | {"messages": [{"role": "user", "content": "do"}], "tools": [F, G]}
ONE = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    spoken: Any = speaker(512, TOOLS)
    spoken.tokenizer.response_template = TEMPLATE
    with served(Batcher(spoken, 4)) as client:
        yield client


def called(message: Any) -> list[str]:
    """The names of the functions that a message calls, rightly, and nothing else."""
    assert not message.content and message.tool_calls
    for each in message.tool_calls:
        fit = [{"size": "small"}, {"size": "large"}] if each.function.name == "f" else [{}]
        assert json.loads(each.function.arguments) in fit
    return [each.function.name for each in message.tool_calls]


def test_an_answer_calls_what_it_must(client: Any) -> None:
    create = client.chat.completions.create
    found = create(**CHAT, tool_choice=ONE).choices[0]
    assert called(found.message) == ["f"] and found.finish_reason == "tool_calls"
    found = create(**CHAT, tool_choice={"type": "function", "function": {"name": 'g "x"'}})
    assert called(found.choices[0].message) == ['g "x"']
    found = create(**CHAT, tool_choice="required", parallel_tool_calls=False, n=3)
    assert all(len(called(each.message)) == 1 for each in found.choices)
    found = create(**CHAT, tool_choice="required").choices[0]
    with create(**CHAT, tool_choice="required", stream=True) as parts:
        deltas = [part.choices[0].delta for part in parts]
    names = [call.function.name for each in deltas for call in each.tool_calls or ()]
    assert names == called(found.message)


def test_a_response_calls_what_it_must(client: Any) -> None:
    flat = {"type": "function"} | F["function"]
    found = client.responses.create(
        model="talker", input="do", tools=[flat], tool_choice={"type": "function", "name": "f"}
    )
    (item,) = found.output
    assert item.type == "function_call" and item.name == "f"
    assert json.loads(item.arguments)["size"] in ("small", "large")


def test_arguments_are_an_object_whatever_the_schema_says() -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer: Any = speaker(64).tokenizer
    fields = {"tool_calls": {**CALLS, "open": "<call>"}}
    tokenizer.response_template = {**TEMPLATE, "fields": fields}
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    body = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    source = form_of_calls(body, tokenizer, None).source
    tokens = llguidance.LLTokenizer("byte")
    for arguments, fits in (('{"a": 1}', True), ("{}", True), ('{"a": "x"}', False), ("5", False)):
        text = f'<call>{{"name": "f", "arguments": {arguments}}}</call>'
        ids = tokens.tokenize_str(text)
        matcher = llguidance.LLMatcher(tokens, source)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits, arguments


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tool_choice": "any"}, "tool_choice is 'any'; expected 'auto', 'none', 'required'"),
        ({"tool_choice": {"type": "function"}}, "expected 'auto', 'none', 'required'"),
        ({"tool_choice": ONE, "tools": [G]}, r"tool_choice is .*, and the tools are: 'g \"x\"'"),
        ({"tools": []}, "tool_choice is 'required', and the tools are: none"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "the parameters of 'f': the JSON schema cannot be used",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(asked: dict[str, Any], said: str) -> None:
    tokenizer: Any = speaker(64).tokenizer
    tokenizer.response_template = TEMPLATE
    with pytest.raises(Refused, match=said) as caught:
        form_of_calls(CHAT | {"tool_choice": "required"} | asked, tokenizer, None)
    at = "tools[0].function.parameters" if "parameters" in said else "tool_choice"
    assert caught.value.param == at


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "xml-inline"},
        {"content_args": {"unquoted_keys": True}},
        {"transform": {"type": "function", "function": {"name": "f", "arguments": "{content}"}}},
        {"open_pattern": r"<call (?P<name>\w+)>"},
    ],
)
def test_calls_that_are_not_json_are_refused(changed: dict[str, Any]) -> None:
    fields = {**FIELDS, "tool_calls": {**CALLS, **changed}}
    tokenizer = SimpleNamespace(response_template={**TEMPLATE, "fields": fields})
    with pytest.raises(ValueError, match="not known that the target writes calls as JSON"):
        form_of_calls(CHAT | {"tool_choice": "required"}, tokenizer, None)
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    with pytest.raises(ValueError, match="let the model choose"):
        form_of_calls(CHAT | {"tool_choice": "required"}, object(), model)
    model.config.model_type, tokenizer = "qwen3", speaker(64).tokenizer  # type: ignore[assignment]
    assert (
        "<tool_call>" in form_of_calls(CHAT | {"tool_choice": "required"}, tokenizer, model).source
    )
