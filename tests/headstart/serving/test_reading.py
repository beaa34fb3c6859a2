"""Calls of tools, thoughts and text in answers, also in those that a parser cannot read."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Emitted, LogProbabilities
from headstart.infer.stats import Stats
from tests.support.chats import CHATML, TOOLS
from tests.support.served import served, speaker

if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

from transformers.cli.serving.utils import ReasoningText, response_events_to_chunks

from headstart.serving.probabilities import Log
from headstart.serving.reading import Read, Reader
from headstart.serving.streamers import Cut

CALLS = {
    "open_pattern": r"\s*<call>",
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": CALLS,
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
F = '{"name": "f", "arguments": {"a": 1}}'
G = F.replace('"f"', '"g"')
ONE = f"<call>{F}</call>"
BROKEN = ['<call>{"name": "f", "arg</call>', '<call>{"name": "f"}</call>', "<call>[]</call>"]
BROKEN += ['<call>{"name": 5, "arguments": {}}</call>', '<call>{"name": "f", "argum']
CALL = "function_call"


class Repeats:
    """In a batcher's place: answers with what it is asked, a token a round."""

    waiting = 0

    def __init__(self, template: str = CHATML) -> None:
        spoken: Any = speaker(512, template)
        self.model, self.tokenizer, self.stats = spoken.model, spoken.tokenizer, Stats()
        self.tokenizer.response_template = TEMPLATE
        self.stats.decode_seconds = 1.0

    def generate(self, input_ids: Any, streamer: Any, generation_config: Any, **_: Any) -> Any:
        asked = self.tokenizer.decode(input_ids[0]).split("user\n")[1].split("<|im_end|>")[0]
        ids = self.tokenizer.encode(asked + "<|im_end|>", add_special_tokens=False)
        ids = torch.tensor(ids[: generation_config.max_new_tokens])
        streamer.put(input_ids)
        for each in ids.split(1):
            streamer.put(each)
        streamer.end()
        return torch.cat((input_ids, ids[None]), 1)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(Repeats()) as client:
        yield client


def chat(client: Any, text: str, stream: bool, **options: Any) -> tuple[str, str, list[Any], str]:
    """The text, thoughts, calls and finish_reason of an answer."""
    body = {"model": "talker", "messages": [{"role": "user", "content": text}]}
    found = client.chat.completions.create(**body | options, stream=stream)
    if not stream:
        message = found.choices[0].message
        calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]
        thoughts = getattr(message, "reasoning_content", "")
        return message.content, thoughts, calls, found.choices[0].finish_reason
    choices = [part.choices[0] for part in found]
    deltas = [each.delta for each in choices]
    calls = [call.function for each in deltas for call in each.tool_calls or ()]
    return (
        "".join(each.content or "" for each in deltas),
        "".join(getattr(each, "reasoning_content", "") for each in deltas),
        [(each.name, each.arguments) for each in calls],
        choices[-1].finish_reason,
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_no_call_is_text(client: Any, stream: bool) -> None:
    assert chat(client, ONE, stream) == ("", "", [("f", '{"a": 1}')], "tool_calls")
    for text in BROKEN:
        assert chat(client, text, stream) == (text, "", [], "stop")
        found = chat(client, f"ab\n{text}", stream)
        assert found == (f"ab\n{text}", "", [], "stop")
    cut = chat(client, ONE, stream, max_tokens=19)
    assert cut == (ONE[:19], "", [], "length")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_text_on_both_sides_of_a_call_is_kept(client: Any, stream: bool) -> None:
    found = chat(client, f"ab{ONE} c{ONE}{BROKEN[0]}", stream)
    assert found == (f"ab c{BROKEN[0]}", "", [("f", '{"a": 1}')] * 2, "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_line_ends_around_marks_are_left_out(client: Any, stream: bool) -> None:
    found = chat(client, "<think>\nso</think>\n\nab", stream)
    assert found == ("ab", "so", [], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_and_the_space_around_are_left_out(client: Any, stream: bool) -> None:
    text = "<think>so it \n</think>\n\na b\n\n  c d \n"
    assert chat(client, text, stream) == ("a b\n\n  c d", "so it", [], "stop")
    assert chat(client, text, stream, stop="c")[:2] == ("a b", "so it")
    assert chat(client, text, stream, stop=["\n\n  c", "x"])[:2] == ("a b", "so it")
    assert chat(client, text, stream, stop="it")[:2] == ("", "so")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_tools_of_a_request_say_what_arguments_are(client: Any, stream: bool) -> None:
    """Their types reach the parser of an answer, however it is sent."""
    fields: Any = dict(TEMPLATE["fields"])
    fields["tool_calls"] = {
        "open_pattern": r"<call>(?P<name>\w+)",
        "close": "</call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w)=(?P<value>[^>]*)>"},
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    batcher = Repeats(TOOLS)
    batcher.tokenizer.response_template = {**TEMPLATE, "fields": fields}
    with served(batcher) as client:
        found = chat(client, "<call>f<a=1></call>", stream, tools=tools)
    assert found[2] == [("f", '{"a": "1"}')]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_call_of_several_answers_has_its_own_id(client: Any, stream: bool) -> None:
    asked = [{"role": "user", "content": ONE + ONE}]
    found = client.chat.completions.create(model="talker", messages=asked, n=2, stream=stream)
    parts = list(found) if stream else [found]
    said = [
        getattr(each, "delta" if stream else "message") for part in parts for each in part.choices
    ]
    names = [call.id for each in said for call in each.tool_calls or ()]
    assert len(set(names)) == len(names) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
def test_probabilities_of_the_text_alone(size: int) -> None:
    """Those of thoughts, calls and their marks are left out, whatever the rounds."""
    tokenizer: Any = speaker(512).tokenizer
    text = f"<think>so <b</think>ab <call{ONE}c{BROKEN[0]}d"
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    said = list[Any]()
    log = Log([], {tokenizer.convert_tokens_to_ids("<|im_end|>")})
    reader = Reader(TEMPLATE, prefix="<|im_start|>assistant\n")
    cut = Cut(tokenizer, said.append, threading.Event(), reader, log=log, of_text=True)
    for at in range(0, len(ids), size):
        part = np.array([ids[at : at + size]])
        own = LogProbabilities(-1.0 * part, part[..., None], -1.0 * part[..., None])
        count = np.array([part.shape[1]])
        cut.put_round(Emitted(count, count, part, logprobs=own))
    cut.end()
    told = [each.token for item in said for each in getattr(item, "told", ())]
    assert tokenizer.decode(told) == f"ab <callc{BROKEN[0]}d"
    assert not any(getattr(item, "told", ()) for item in said if isinstance(item, ReasoningText))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_end_token_is_no_thought(client: Any, stream: bool) -> None:
    assert chat(client, "<think>so", stream) == ("", "so", [], "stop")


def test_usage_tells_how_many_tokens_are_of_thoughts(client: Any) -> None:
    """Their marks do not count."""
    asked: dict[str, Any] = {"model": "talker"}
    for text, count in ((f"a<think>so it</think>b{ONE}", 5), ("ab", 0), ("<think>so", 2)):
        chat = asked | {"messages": [{"role": "user", "content": text}]}
        found = client.chat.completions.create(**chat).usage
        assert found.completion_tokens_details.reasoning_tokens == count
        *_, last = client.chat.completions.create(**chat, stream=True)
        assert last.usage == found
        found = client.chat.completions.create(**chat, n=3).usage
        assert found.completion_tokens_details.reasoning_tokens == 3 * count
        *_, last = client.chat.completions.create(**chat, n=3, stream=True)
        assert last.usage == found
        found = client.responses.create(**asked, input=text).usage
        assert found.output_tokens_details.reasoning_tokens == count
        *_, last = client.responses.create(**asked, input=text, stream=True)
        assert last.response.usage == found


def test_several_calls_may_stand_in_one_region() -> None:
    each = {"name": "{name}", "arguments": "{arguments}"}
    calls = CALLS | {"transform": {"function": each}, "transform_each": True, "repeats": False}
    fields: dict[str, Any] = {**TEMPLATE["fields"], "tool_calls": calls}  # type: ignore[dict-item]
    reader = Reader({**TEMPLATE, "fields": fields}, prefix="")
    events = [*reader.feed(f"<call>[{F}, {G}]</call>"), *reader.finalize()[1]]
    read = Read.of(response_events_to_chunks(events))
    assert [call.name for call in read.calls] == ["f", "g"] and read.text == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["message"]),
        (ONE, ["function_call"]),
        (f"<think>so</think>ab{ONE}{ONE}", ["reasoning", "message", *["function_call"] * 2]),
        (f"ab{ONE}cd", ["message", "function_call", "message"]),
    ],
)
def test_a_streamed_response_is_the_whole_one(client: Any, text: str, expected: Any) -> None:
    """As the client puts it together, which refuses events for the wrong item."""
    asked: dict[str, Any] = {"model": "talker", "input": text}
    with client.responses.stream(**asked, metadata={"a": "b"}) as events:
        kinds = [event.type for event in events]
        found = events.get_final_response()
    assert [item.type for item in found.output] == expected
    assert len({item.id for item in found.output}) == len(expected)
    assert kinds.count("response.output_item.done") == len(expected)
    assert found.output_text == text.removeprefix("<think>so</think>").replace(ONE, "")
    whole = client.responses.create(**asked, metadata={"a": "b"})
    assert [item.type for item in whole.output] == expected
    assert whole.metadata == found.metadata == {"a": "b"}
    assert whole.output_text == found.output_text and whole.usage == found.usage
    calls = [
        [(each.name, json.loads(each.arguments)) for each in answer.output if each.type == CALL]
        for answer in (found, whole)
    ]
    assert calls[0] == calls[1] == [("f", {"a": 1})] * expected.count(CALL)
