"""Answers without their stop strings, errors in the protocol's form, and clients that leave."""

import asyncio
import gc
import gzip
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

import headstart
from headstart.infer import Batcher, generate_options
from headstart.infer.stats import Stats
from tests.support.chats import GEMMA, TOOLS, chat_tokenizer
from tests.support.paths import SHARED
from tests.support.served import served, speaker

if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

from transformers.cli.serving.utils import Modality

from headstart.serving.handlers import Chats
from headstart.serving.responses import Responses

STORIES = SHARED / "models" / "stories260k"
ASKED = [{"role": "user", "content": "say something"}]
BODY: dict[str, Any] = {"model": "talker", "messages": ASKED, "max_tokens": 30, "temperature": 0}
WAIT = 30  # seconds, after which a test has failed


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(Batcher(speaker(256, GEMMA), 1)) as client:
        yield client


def post(
    client: Any, path: str, body: Any, method: str = "POST", kind: str = "application/json"
) -> tuple[int, str]:
    """The status and text of an answer; a body that is no text is sent as JSON."""
    sent = body if isinstance(body, str) else json.dumps(body)
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=WAIT)
    connection.request(method, path, sent, {"Content-Type": kind} if kind else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def chunks(client: Any, **options: Any) -> list[str]:
    """The texts of a streamed answer, piece by piece."""
    with client.chat.completions.create(**BODY | options, stream=True) as parts:
        return [part.choices[0].delta.content or "" for part in parts]


def test_a_stop_string_is_not_in_the_answer(client: Any) -> None:
    whole = client.chat.completions.create(**BODY).choices[0].message.content
    stop = whole[7:10]
    expected = whole[: whole.index(stop)]
    for given in (stop, [stop], ["nowhere in it", stop]):
        found = client.chat.completions.create(**BODY, stop=given)
        assert found.choices[0].message.content == expected != whole
        assert found.choices[0].finish_reason == "stop"
        assert "".join(chunks(client, stop=given)) == expected
    for given in ("", [], None):
        assert (
            client.chat.completions.create(**BODY, stop=given).choices[0].message.content == whole
        )
        assert "".join(chunks(client, stop=given)) == whole
    options = {"model": "talker", "max_tokens": 30, "temperature": 0, "prompt": "once upon"}
    whole = client.completions.create(**options).choices[0].text
    found = client.completions.create(**options, stop=whole[5:7])
    assert found.choices[0].text == whole[: whole.index(whole[5:7])] != whole


def test_a_stop_string_ends_an_answer_without_a_look_at_the_vocabulary(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take seconds; and a stop string that begins in the prompt ends nothing."""
    monkeypatch.setattr(generate_options, "StopStringCriteria", None)
    options: dict[str, Any] = {"model": "talker", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(prompt="upon x", **options).choices[0].text
    found = client.completions.create(prompt="upon x", stop=whole[5:8], **options)
    assert found.usage.completion_tokens == whole.index(whole[5:8]) + 3 < 30
    found = client.completions.create(prompt="upon x", stop="x" + whole[0], **options)
    assert found.choices[0].text == whole.partition("x" + whole[0])[0] != whole[0]


@pytest.mark.parametrize("settings", [{"eos_token_id": 0}, {"stop_strings": "!"}])
def test_an_answer_that_ends_with_its_last_token_is_not_cut(
    client: Any, settings: dict[str, Any]
) -> None:
    """The end token, here `!`, is the third one, as the stop string is."""
    bias = [[[0], -90.0], [[72, 72, 0], 500.0], [[72], 90.0]]
    for limit, reason in ((2, "length"), (3, "stop"), (4, "stop")):
        given = settings | {"sequence_bias": bias, "max_new_tokens": limit, "do_sample": False}
        body = {"model": "talker", "extra_body": {"generation_config": json.dumps(given)}}
        found = client.completions.create(prompt="a", **body)
        assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (
            min(limit, 3), reason,
        )  # fmt: skip
        with client.completions.create(prompt="a", stream=True, **body) as parts:
            assert [part.choices[0].finish_reason for part in parts][-1] == reason
        answer = client.responses.create(input="a", **body)
        assert answer.status == ("completed" if reason == "stop" else "incomplete")


def test_a_stop_string_is_not_in_thoughts_and_holds_no_call_back() -> None:
    from transformers.cli.serving.utils import ReasoningText, ToolCall

    from headstart.serving.streamers import Cut

    call = ToolCall("f", "{}")
    tokenizer: Any = speaker(256).tokenizer

    def written(*items: Any) -> list[Any]:
        said = list[Any]()
        cut = Cut(tokenizer, said.append, threading.Event(), stops=["XY"])
        for item in items:
            cut._enqueue(item)
            cut._end_round()
        cut.end()
        return [(type(item), item) for item in said]

    thought = ReasoningText
    assert written(thought("aX"), "Yb", "cX", call) == [
        (thought, "a"), (thought, "X"), (str, "Yb"), (str, "c"), (str, "X"), (ToolCall, call),
    ]  # fmt: skip
    assert written(thought("aXY"), "b") == [(thought, "a")]


def test_what_a_round_wrote_is_one_piece(client: Any) -> None:
    class Rounds(Scripted):
        """Writes three letters a round."""

        def generate(self, input_ids: Any, streamer: Any, **options: Any) -> Any:
            ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list("abc")))
            streamer.put(input_ids)
            for _ in range(2):
                streamer.put(ids)
            streamer.end()
            return torch.cat((input_ids, ids[None], ids[None]), 1)

    with served(Rounds(lambda written: None)) as client:
        assert [each for each in chunks(client) if each] == ["abc", "abc"]
        assert [each for each in chunks(client, stop="ca") if each] == ["ab"]


def test_a_continuation_keeps_the_space_before_it() -> None:
    """The decoder of this tokenizer, one of SentencePiece, leaves it out of a text alone."""
    if not STORIES.is_dir():
        pytest.skip("no shared data here")
    asked: dict[str, Any] = {"model": "talker", "prompt": "Once upon", "max_tokens": 9}
    with served(Batcher(headstart.load(STORIES), 1)) as client:
        found = client.completions.create(**asked, temperature=0)
        with client.completions.create(**asked, temperature=0, stream=True) as parts:
            streamed = "".join(part.choices[0].text for part in parts)
    assert found.choices[0].text == streamed and streamed.startswith(" a time, there was")


def test_a_template_is_given_all_of_a_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    said = {"role": "assistant", "content": "I look."}
    found = Chats.get_processor_inputs_from_messages(
        [
            said | {"reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": [{"type": "text", "text": "42"}]},
            said | {"tool_calls": []},
        ],
        Modality.LLM,
    )
    read = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert found[0] == said | {"reasoning_content": "hm", "tool_calls": [read]}
    assert found[1] == {"role": "tool", "name": "f", "content": "42"}
    text: Any = chat_tokenizer(TOOLS).apply_chat_template(found, tokenize=False)
    assert 'I look.<tool_call>{"name": "f", "arguments": {}}' in text and text.count("look") == 2


def test_instructions_and_messages_of_developers_are_read() -> None:
    """A template that does not know developers would leave them out."""
    template = "{% for m in messages %}{% if m.role in ['system', 'user'] %}"
    template += "{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"
    developer = {"role": "developer", "content": "Be kind."}
    for content in ("So.", [{"type": "input_text", "text": "So."}]):
        given = [{"role": "system", "content": content}, *ASKED]
        found = Responses._normalize_input({"input": given, "instructions": "Be."})
        found = Responses.get_processor_inputs_from_messages(found, Modality.LLM)
        assert [each["content"].split() for each in found] == [["Be.", "So."], ["say", "something"]]
    assert Responses._normalize_input({"input": "a", "instructions": "b"})[0]["content"] == "b"
    with served(Batcher(speaker(256, template), 1)) as client:
        create = client.chat.completions.create
        counts = [
            create(**BODY | {"messages": [each, *ASKED]}).usage.prompt_tokens
            for each in (developer, developer | {"role": "system"})
        ]
        body = {"model": "talker", "input": [developer, *ASKED], "max_output_tokens": 2}
        counts.append(client.responses.create(**body).usage.input_tokens)
        assert counts[0] == counts[1] == counts[2] > len("system:Be kind.")


def test_tools_that_may_not_be_called_are_not_told(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    found = client.chat.completions.create(**BODY, tools=[tool], tool_choice="none")
    assert found.usage == client.chat.completions.create(**BODY).usage


def test_a_bias_or_a_repetition_penalty_changes_the_text(client: Any) -> None:
    whole = client.chat.completions.create(**BODY).choices[0].message.content
    for given in ({"logit_bias": {"70": 100}}, {"extra_body": {"repetition_penalty": 1.8}}):
        found = client.chat.completions.create(**BODY, **given).choices[0].message.content
        assert found != whole
    found = client.chat.completions.create(**BODY, extra_body={"repetition_penalty": 1})
    assert found.choices[0].message.content == whole
    options = {"model": "talker", "max_tokens": 3, "temperature": 0, "logit_bias": {"70": 100}}
    assert client.completions.create(prompt="a", **options).choices[0].text == "ggg"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "template refuses this chat: no sys"),
        ({"chat_template_kwargs": "x"}, "expected an object"),
        ({"logit_bias": {"99999": 1}}, "is not among the target's"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "shorten it"),
        ({"generation_config": '{"num_beams": 3}'}, "beam"),
        ({"generation_config": "{bad"}, "generation_config is"),
        (
            {"generation_config": '{"suppress_tokens": [99999]}'},
            "suppress_tokens is 99999; expected",
        ),
        ({"generation_config": '{"stop_strings": ["\\ud800"]}'}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "messages holds half of a surr"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages', which is no setting"),
        ({"chat_template_kwargs": {"conversations": []}}, "'conversations', which is no setting"),
        ({"stop": ["x"] * 65}, "stop has 65 texts; expected at most 64"),
        (
            {"messages": [{"role": "user", "content": "a" * 70_000}]},
            "at most 65,536 bytes; shorten",
        ),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_mistake_is_answered_with_400(
    client: Any, given: dict[str, Any], said: str, stream: bool
) -> None:
    status, text = post(client, "/v1/chat/completions", BODY | given | {"stream": stream})
    error = json.loads(text)["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert said in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"model": "other"}, "model", "model_not_found"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": [ASKED[0] | {"content": "xyz" * 999}]}, "messages", "context_length_exceed"),
        ({"messages": [ASKED[0] | {"content": "a" * 70_000}]}, "messages", "context_length_exceed"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "invalid_value"),
        ({"best_of": 2}, "best_of", "unknown_parameter"),
        ({"guided_json": {}}, "guided_json", "unknown_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"generation_config": '{"top_k": "a"}'}, "generation_config.top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
    ],
)
def test_an_error_names_the_field_and_the_fault(
    client: Any, given: dict[str, Any], param: str, code: str | None
) -> None:
    status, text = post(client, "/v1/chat/completions", BODY | given)
    error = json.loads(text)["error"]
    assert status == (404 if param == "model" else 400)
    assert [*error] == ["message", "type", "param", "code"]
    assert error["param"] == param
    assert error["code"] == code if code is None else error["code"].startswith(code)


def test_null_and_nothing_are_the_same(client: Any) -> None:
    given = {"chat_template_kwargs": None, "stop": None, "seed": None, "tools": None}
    status, text = post(client, "/v1/chat/completions", BODY | given)
    expected = client.chat.completions.create(**BODY).choices[0].message.content
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "said"),
    [
        ("/v1/chat/completions", "{bad", "POST", 400, "is no JSON"),
        ("/v1/chat/completions", "", "POST", 400, "is no JSON"),
        ("/v1/chat/completions", "[1]", "POST", 400, "expected a JSON object"),
        ("/v1/chat/completions", "[" * 100_000, "POST", 400, "JSON|nested"),
        ("/v1/chat/completions", "{}", "POST", 400, "messages"),
        ("/v1/responses", {"model": "talker"}, "POST", 400, "input"),
        ("/v1/responses", {"input": "a", "prompt": "b"}, "POST", 400, "'prompt' is no field"),
        ("/v1/responses", {"input": "a", "moderation": {"a": 1}}, "POST", 400, "moderation is"),
        ("/v1/embeddings", {"input": "a"}, "POST", 404, "/v1/embeddings is not served here"),
        ("/v1/chat/completions", "", "GET", 405, "GET /v1/chat/completions is not served"),
    ],
)
def test_what_cannot_be_read_is_answered_with_an_error_object(
    client: Any, path: str, body: Any, method: str, status: int, said: str
) -> None:
    found, text = post(client, path, body, method)
    error = json.loads(text)["error"]
    assert found == status and {"type", "param", "code"} < error.keys()
    message = error["message"]
    assert any(part in message for part in said.split("|"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_halves_of_characters_are_named_everywhere(client: Any, path: str) -> None:
    for name in ("prompt", "messages", "input", "stop", "model", "no_such_field"):
        status, text = post(client, path, {name: "a\ud800b"})
        assert status == 400 and f"{name} holds half" in json.loads(text)["error"]["message"]
    assert post(client, path, {"\ud800": 1})[0] == 400


def test_fields_of_other_servers_change_the_text_or_are_refused(client: Any) -> None:
    asked = BODY | {"temperature": 1.5, "seed": 3}
    whole = client.chat.completions.create(**BODY).choices[0].message.content
    for given, same in (({"top_k": 1}, True), ({"min_p": 1}, True), ({"top_k": -1}, False)):
        found = client.chat.completions.create(**asked, extra_body=given)
        assert (found.choices[0].message.content == whole) == same, given
    status, text = post(client, "/v1/completions", {"prompt": "a", "min_tokens": 2})
    assert status == 400 and "give min_new_tokens in generation_config" in text
    status, text = post(client, "/v1/completions", {"prompt": "a", "guided_regex": "a"})
    assert status == 400 and "give regex in structured_outputs" in text


def test_without_the_key_nothing_is_answered() -> None:
    from openai import AuthenticationError

    batcher: Any = Scripted(ends(ValueError("enough"), after=0))
    with served(batcher, key="secret") as client:
        assert client.models.retrieve("talker").id == "talker"
        assert post(client, "/health", "", "GET")[0] == 200
        for path in ("/v1/models", "/v1/completions", "/nowhere"):
            status, text = post(client, path, "", "POST")
            assert status == 401 and "Bearer" in json.loads(text)["error"]["message"]
        for given in ("none", "secret2", "s"):
            with pytest.raises(AuthenticationError) as caught:
                client.with_options(api_key=given).models.list()
            assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_what_a_page_of_any_site_may_send_is_refused(client: Any, kind: str) -> None:
    status, text = post(client, "/v1/completions", {"prompt": "a"}, kind=kind)
    message = json.loads(text)["error"]["message"]
    assert status == 415 and message.endswith("expected application/json")
    asked = {"prompt": "a", "max_tokens": 1}
    assert post(client, "/v1/completions", asked, kind="Application/JSON; charset=utf-8")[0] == 200


def test_an_answer_has_the_id_of_its_request(client: Any) -> None:
    for given in ("mine", None):
        connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=WAIT)
        kinds = {"Content-Type": "application/json"} | ({"X-Request-Id": given} if given else {})
        connection.request("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 1}', kinds)
        answer = connection.getresponse()
        name = ", ".join(answer.headers.get_all("x-request-id") or ())
        assert json.loads(answer.read())["id"] == f"cmpl-{name}"
        assert name == given if given else len(name) == 36


def test_a_compressed_body_is_refused_as_such(client: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=WAIT)
    kinds = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    connection.request("POST", "/v1/completions", gzip.compress(b"{}"), kinds)
    answer = connection.getresponse()
    assert answer.status == 415 and "Content-Encoding is 'gzip'" in answer.read().decode()


def test_a_body_that_is_too_large_is_not_kept(client: Any) -> None:
    status, text = post(client, "/v1/completions", {"prompt": "a" * 3_000_000})
    assert status == 413 and "expected at most 1,441,792" in json.loads(text)["error"]["message"]


def test_a_client_that_leaves_while_it_sends_is_no_error() -> None:
    """An error would be raised here, which a server writes into its log."""
    from headstart.serving.app import server_of

    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    kind = (b"content-type", b"application/json")
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [kind]}
    scope |= {"query_string": b"", "scheme": "http", "server": ("127.0.0.1", 80)}
    app: Any = server_of(Scripted(lambda written: None), "talker")  # type: ignore[arg-type]
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499


class Scripted:
    """In a batcher's place: writes letters until it is told what to do, or its client leaves."""

    def __init__(self, act: Callable[[int], None]):
        spoken: Any = speaker(256)
        self.model, self.tokenizer, self.stats = spoken.model, spoken.tokenizer, Stats()
        self.stats.decode_seconds = 1.0
        self._act, self.began, self.left = act, threading.Event(), threading.Event()

    def generate(self, input_ids: Any, streamer: Any, **options: Any) -> Any:
        letter = torch.tensor(self.tokenizer.convert_tokens_to_ids(["a"]))
        try:
            streamer.put(input_ids)
            for written in range(1000):
                self._act(written)
                self.began.set()
                streamer.put(letter)
        except Exception:
            self.left.set()
            raise
        return torch.cat((input_ids, letter[None]), 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_ends_when_its_client_leaves(stream: bool, caplog: Any) -> None:
    batcher = Scripted(lambda written: time.sleep(0.05))
    with served(batcher) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=WAIT)
        sent = json.dumps(BODY | {"stream": stream})
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", sent, kind)
        assert batcher.began.wait(WAIT) and not batcher.left.wait(0.5)
        connection.close()
        assert batcher.left.wait(WAIT)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
def test_a_request_that_waits_has_no_file_open_but_its_connection() -> None:
    """A process may have 1,024 files open, usually."""
    go, count = threading.Event(), 8

    def act(written: int) -> None:
        assert go.wait(WAIT)
        raise ValueError("enough")

    batcher = Scripted(act)
    began, generate = threading.Semaphore(0), batcher.generate
    batcher.generate = lambda **given: (began.release(), generate(**given))  # type: ignore[method-assign]
    with served(batcher) as client, ThreadPoolExecutor(count) as pool:
        before = len(os.listdir("/proc/self/fd"))
        waits = [pool.submit(post, client, "/v1/chat/completions", BODY) for _ in range(count)]
        assert all(began.acquire(timeout=WAIT) for _ in range(count))
        opened = len(os.listdir("/proc/self/fd")) - before
        go.set()
        assert all("enough" in each.result(WAIT)[1] for each in waits)
    assert opened <= 2 * count  # of the client and of the server


def ends(error: Exception, after: int) -> Callable[[int], None]:
    """Raises an error after so many tokens."""

    def act(written: int) -> None:
        if written == after:
            raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError('no "such"\nthing'), 400, 'no "such" thing'),
        (RuntimeError("/secret/path"), 500, "could not write this answer (RuntimeError)"),
    ],
)
def test_an_error_of_a_stream_is_an_object(error: Exception, status: int, said: str) -> None:
    """Before the first token it is the answer, and later its last event."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    with served(Scripted(ends(error, after=0))) as client:
        for stream in (False, True):
            found, text = post(client, "/v1/chat/completions", BODY | {"stream": stream})
            assert found == status and json.loads(text)["error"]["type"] == kind
            assert said in json.loads(text)["error"]["message"]
    with served(Scripted(ends(error, after=3))) as client:
        found, text = post(client, "/v1/chat/completions", BODY | {"stream": True})
        *parts, last, done = [each.removeprefix("data: ") for each in text.split("\n\n")[:-1]]
        written = [json.loads(each)["choices"][0]["delta"].get("content") for each in parts]
        assert found == 200 and written == [None, "a", "a", "a"] and done == "[DONE]"
        assert json.loads(last)["error"]["type"] == kind
        assert said in json.loads(last)["error"]["message"]
        body = {"model": "talker", "input": "say something", "stream": True}
        found, text = post(client, "/v1/responses", body)
        parts = [each.partition("\ndata: ") for each in text.split("\n\n")[:-1]]
        events = [json.loads(data) for _, _, data in parts]
        assert [name for name, _, _ in parts] == [f"event: {each['type']}" for each in events]
        assert [each["type"] for each in events[-2:]] == ["error", "response.failed"]
        assert said in events[-2]["message"]


def test_a_failure_leaves_the_connection_and_tells_no_text(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for after in (0, 2):
        with served(Scripted(ends(RuntimeError("a secret text"), after))) as client:
            connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=WAIT)
            kept = None
            for stream in (False, True):
                sent = json.dumps(BODY | {"stream": stream})
                kind = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/chat/completions", sent, kind)
                assert "could not write this answer" in connection.getresponse().read().decode()
                assert connection.sock is not None and kept in (None, connection.sock)
                kept = connection.sock
    said = capfd.readouterr().err
    assert said.count("error: an answer failed with RuntimeError at ") == 4
    assert "secret" not in said and "Traceback" not in said


def test_others_are_answered_while_a_long_prompt_is_tokenized() -> None:
    class Slow:
        """A tokenizer that takes its time."""

        def __init__(self, tokenizer: Any):
            self._tokenizer, self.began = tokenizer, threading.Event()
            self.may_end = threading.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def __call__(self, *given: Any, **options: Any) -> Any:
            self.began.set()
            assert self.may_end.wait(WAIT)
            return self._tokenizer(*given, **options)

    batcher = Scripted(ends(ValueError("enough"), after=0))
    batcher.tokenizer = slow = Slow(batcher.tokenizer)
    with served(batcher) as client, ThreadPoolExecutor(1) as pool:
        body = {"model": "talker", "prompt": "a"}
        waits = pool.submit(post, client, "/v1/completions", body)
        assert slow.began.wait(WAIT)
        assert post(client, "/health", "", "GET")[0] == 200 and not waits.done()
        slow.may_end.set()
        assert "enough" in waits.result(WAIT)[1]


def test_the_rate_is_without_the_time_of_waiting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    batcher = Scripted(lambda written: None)
    stats = SimpleNamespace(prefill_seconds=0.25, decode_seconds=0.25, rounds=0, kept_tokens=7)
    batcher.stats = stats  # type: ignore[assignment]
    with served(batcher) as client:
        post(client, "/v1/chat/completions", BODY)
    assert "1 token in 0.50 s (2/s), 7 tokens of the prompt kept" in capfd.readouterr().err


EXITS = """
import atexit, threading
said = lambda: print(*(each.name for each in threading.enumerate() if "answers" in each.name))
atexit.register(said)  # called last
from transformers import GenerationConfig
from headstart.infer import Batcher
from headstart.serving.writing import Manager, Writer, in_thread
from tests.support.served import speaker

batcher, begun = Batcher(speaker(512), 1), threading.Event()
manager = Manager(Writer(batcher, "talker", None), None)

def answer():
    while True:
        inputs = batcher.tokenizer("once upon", return_tensors="pt")
        config = GenerationConfig(max_new_tokens=400)
        said = lambda item: begun.set()
        manager._generation(batcher.model, batcher.tokenizer, inputs, config, said)[1]()

in_thread(answer)
begun.wait()
"""


def test_nothing_is_written_any_more_when_the_interpreter_ends() -> None:
    """It would be ended amid torch's code, which aborts the process."""
    ran = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr
