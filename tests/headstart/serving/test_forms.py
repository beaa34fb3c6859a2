"""Answers in the form that a request asks for, and forms that there are none of."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Batcher
from tests.support.chats import TOOLS
from tests.support.served import served, speaker

pytest.importorskip("llguidance")
if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

from headstart.serving.forms import grammar_of, thoughts_of

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"model": "talker", "temperature": 0}
CHAT = ASKED | {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 120}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(Batcher(speaker(512), 4)) as client:
        yield client


def fits(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["ok", "size"] and isinstance(found["ok"], bool)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_has_the_form_of_a_schema(client: Any, temperature: float) -> None:
    asked = CHAT | {"response_format": OF_SCHEMA, "temperature": temperature, "seed": 1}
    answer = client.chat.completions.create(**asked).choices[0]
    assert fits(answer.message.content) and answer.finish_reason == "stop"
    with client.chat.completions.create(**asked, stream=True) as parts:
        streamed = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(streamed) == answer.message.content
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    found = client.responses.create(
        model="talker", input="Is it?", text={"format": form}, temperature=temperature
    )
    assert fits(found.output_text)


def test_an_answer_is_parsed_as_the_clients_own_type(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Part(pydantic.BaseModel):
        size: Literal["small", "large"]

    class Whole(pydantic.BaseModel):
        parts: Annotated[list[Part], pydantic.Field(min_length=1, max_length=2)]
        count: int | None

    answer = client.chat.completions.parse(**CHAT, seed=3, response_format=Whole)
    assert isinstance(answer.choices[0].message.parsed, Whole)


def test_other_forms(client: Any) -> None:
    asked = CHAT | {"response_format": {"type": "json_object"}}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text.startswith("{")
    for form, expected in (
        ({"choice": ["maybe"]}, "maybe"),
        ({"regex": "a{3}b"}, "aaab"),
        ({"grammar": 'start: "x" "y"'}, "xy"),
        ({"json": {"const": 7}, "regex": None}, "7"),
    ):
        extra = {"structured_outputs": form}
        found = client.chat.completions.create(**CHAT, extra_body=extra)
        assert found.choices[0].message.content == expected
        found = client.completions.create(**ASKED, prompt="It is", max_tokens=9, extra_body=extra)
        assert found.choices[0].text == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format is .*; expected an object of the"),
        ({"response_format": "json"}, "response_format is 'json'; expected an object"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is None; expected a"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is None; expected a"),
        ({"text": {"type": "json_schema", "schema": SCHEMA}}, "expected an object with format"),
        ({"structured_outputs": {}}, "structured_outputs is {}; expected an object with one of"),
        ({"structured_outputs": {"xml": 1}}, "expected an object with one of json, "),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex is 1; expected a text"),
        ({"structured_outputs": {"json_object": 1}}, "json_object is 1; expected true"),
        ({"structured_outputs": {"regex": "("}}, "regular expression cannot be used"),
        ({"response_format": OF_SCHEMA, "tools": TOOLS}, "response_format and tools"),
        (
            {"response_format": OF_SCHEMA, "structured_outputs": {"json_object": True}},
            "response_format and structured_outputs; give one of them",
        ),
    ],
)
def test_what_is_no_form_is_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        grammar_of(body)
    assert "\n" not in str(caught.value)


def test_a_mistake_is_answered_with_400(client: Any) -> None:
    from openai import BadRequestError

    wrong = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "objec"}}}
    with pytest.raises(BadRequestError, match="JSON schema cannot be used: Invalid ty") as caught:
        client.chat.completions.create(**CHAT, response_format=wrong)
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")


def test_which_models_think_first() -> None:
    class Model:
        class config:
            model_type = "qwen3"

    assert thoughts_of(object(), Model) == ("<think>", "</think>")
    Model.config.model_type = "llama"
    assert thoughts_of(object(), Model) is None
