"""Calls whose arguments stand between tags, as Qwen 3.5 writes them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Batcher
from tests.support.chats import TOOLS
from tests.support.served import served, speaker

if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

from transformers.cli.serving.utils import get_response_template, response_events_to_chunks

from headstart.serving.calls import form_of_calls
from headstart.serving.reading import Read, reader_of

LLGUIDANCE = pytest.importorskip("llguidance")
MODEL: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5"))
TEMPLATE: Any = get_response_template(object(), MODEL)
SIZE = {"enum": ["small", "very large"], "type": "string"}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "where"},
    "size": {"$ref": "#/$defs/size"},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"anyOf": [{"enum": ["C", "F"], "type": "string"}, {"type": "null"}]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "where": {
        "type": "object",
        "properties": {"size": {"$ref": "#/$defs/size"}},
        "required": ["size"],
        "additionalProperties": False,
    },
    "at": {"$ref": "#/$defs/place", "description": "of a type of its own"},
    "how": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    "count": {"enum": [1, 2]},
    "all": {"type": "boolean"},
    "code": {"type": "string", "pattern": "[0-9]+"},  # need not be there, and cannot be ensured
}


def schema_of(*required: str, **more: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": PROPERTIES, "required": list(required)}
    place = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    known = {"size": SIZE, "place": place}
    return found | {"$defs": known, "additionalProperties": False} | more


def asked(schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    function = {"type": "function", "function": {"name": name, "parameters": schema}}
    messages = [{"role": "user", "content": "do"}]
    return {"messages": messages, "tools": [function], "tool_choice": "required"}


def form(body: dict[str, Any]) -> Any:
    return form_of_calls(body, speaker(64).tokenizer, MODEL)


def written(**values: str) -> str:
    """A call as the template of Qwen 3.5 writes it."""
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


CITY = {"city": "in\n <Rome>"}
TAGS = "a</parameter> </function></tool_call> <parameter=all>"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (CITY, CITY),
        (CITY | {"size": "very large"}, CITY | {"size": "very large"}),
        (CITY | {"days": "7", "all": "true"}, CITY | {"days": 7, "all": True}),
        (CITY | {"unit": "null", "note": "null"}, CITY | {"unit": None, "note": None}),
        (CITY | {"unit": "F", "note": "12"}, CITY | {"unit": "F", "note": "12"}),
        (CITY | {"where": '{"size": "small"}'}, CITY | {"where": {"size": "small"}}),
        (CITY | {"at": '{"name": "Rome"}'}, CITY | {"at": {"name": "Rome"}}),
        (CITY | {"how": '{"name": "Rome"}'}, CITY | {"how": {"name": "Rome"}}),
        (CITY | {"how": "null", "count": "2"}, CITY | {"how": None, "count": 2}),
        ({"city": TAGS}, {"city": TAGS}),
        (CITY | {"at": json.dumps({"name": TAGS})}, CITY | {"at": {"name": TAGS}}),
        ({"city": " a\n\n", "all": "true"}, {"city": " a\n\n", "all": True}),
        ({"city": "", "all": "true"}, {"city": "", "all": True}),
        ({}, None),
        ({"size": "small"}, None),
        (CITY | {"at": "Rome"}, None),
        (CITY | {"at": '{"name": 1}'}, None),
        (CITY | {"count": "3"}, None),
        (CITY | {"size": "tiny"}, None),
        (CITY | {"days": "10"}, None),
        (CITY | {"days": "1.5"}, None),
        (CITY | {"unit": "K"}, None),
        (CITY | {"where": '{"size": "tiny"}'}, None),
        (CITY | {"code": "12"}, None),
        (CITY | {"other": "12"}, None),
        ({"city": "a\n</function>"}, None),
    ],
)
def test_calls_of_the_form_are_read_as_arguments_of_the_schema(
    values: dict[str, str], expected: dict[str, Any] | None
) -> None:
    body, text = asked(schema_of("city")), written(**values)
    tokens = LLGUIDANCE.LLTokenizer("byte")
    matcher = LLGUIDANCE.LLMatcher(tokens, form(body).source)
    ids = tokens.tokenize_str(text)
    fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert fits == (expected is not None)
    if fits:
        processor: Any = SimpleNamespace(decode=lambda ids: "<|im_start|>assistant\n")
        reader: Any = reader_of(processor, MODEL, [[]], body["tools"], ensured=True)
        read = Read.of(response_events_to_chunks([*reader.feed(text), *reader.finalize()[1]]))
        [call] = read.calls
        assert (call.name, json.loads(call.arguments)) == ("f", expected)


def test_an_answer_calls_what_it_must() -> None:
    spoken: Any = speaker(1024, TOOLS)
    spoken.tokenizer.response_template = TEMPLATE
    known = {name: PROPERTIES[name] for name in ("size", "days", "where", "all")}
    schema = schema_of("size", "days", "where", "all", properties=known)
    body: dict[str, Any] = asked(schema) | {"parallel_tool_calls": False, "max_tokens": 400}
    with served(Batcher(spoken, 2)) as client:
        create = client.chat.completions.create
        for seed in range(4):
            found = create(model="talker", temperature=1, seed=seed, **body).choices[0]
            [call] = found.message.tool_calls
            values = json.loads(call.function.arguments)
            assert values["size"] in SIZE["enum"] and values["where"]["size"] in SIZE["enum"]
            assert type(values["days"]) is int and 1 <= values["days"] <= 9
            assert isinstance(values["all"], bool) and found.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("schema", "name", "said"),
    [
        (schema_of("code"), "f", "'f' has 'code', which is neither plain text nor JSON"),
        (
            schema_of("gone", additionalProperties=True),
            "f",
            "'f' requires 'gone'",
        ),
        (schema_of(minProperties=1), "f", "'f' has 'minProperties'"),
        (
            schema_of("to", properties={"to": {"$ref": "#/$defs/size", "maxLength": 5}}),
            "f",
            "'f' has 'to', which is neither plain text nor JSON",
        ),
        (
            schema_of("to", properties={"to": {"type": "array", "items": {"$ref": "#"}}}),
            "f",
            "'f' has 'to', which is neither plain text nor JSON",
        ),
        (schema_of(properties={"a>": {}}), "f", "the parameter 'a>' of 'f' cannot be called"),
        (schema_of(), "f>", "the function 'f>' cannot be called"),
    ],
)
def test_what_cannot_be_ensured_is_refused(schema: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        form(asked(schema, name))


def test_arguments_get_the_types_that_their_schemas_refer_to() -> None:
    """Also where the model chooses; what no schema is, it leaves as it is written."""
    properties = PROPERTIES | {"odd": {"$ref": 1, "type": {}}, "round": {"$ref": "#/$defs/round"}}
    schema = schema_of(properties=properties)
    schema["$defs"] |= {"round": {"$ref": "#/$defs/round"}}
    processor: Any = SimpleNamespace(decode=lambda ids: "<|im_start|>assistant\n")
    reader: Any = reader_of(processor, MODEL, [[]], asked(schema)["tools"], ensured=False)
    text = "<tool_call><function=f><parameter=at>{}</parameter><parameter=odd>1</parameter>"
    text += "<parameter=round>2</parameter></function></tool_call>"
    read = Read.of(response_events_to_chunks([*reader.feed(text), *reader.finalize()[1]]))
    assert json.loads(read.calls[0].arguments) == {"at": {}, "odd": "1", "round": "2"}


@pytest.mark.parametrize("ensured", [False, True])
def test_a_call_that_is_cut_is_text(ensured: bool) -> None:
    processor: Any = SimpleNamespace(decode=lambda ids: "<|im_start|>assistant\n")
    body, whole = asked(schema_of()), written(city="Rome", days="7")
    for end in (len(whole), whole.index("7"), whole.index("</function>"), len(whole) - 1):
        reader: Any = reader_of(processor, MODEL, [[]], body["tools"], ensured)
        events = [*reader.feed(whole[:end]), *reader.finalize()[1]]
        read = Read.of(response_events_to_chunks(events))
        if end == len(whole):
            assert json.loads(read.calls[0].arguments) == {"city": "Rome", "days": 7}
        else:
            assert not read.calls and read.text == whole[:end]
