"""`headstart serve`: answers are the text that the target writes alone; mistakes are said."""

import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available

from headstart.cli import main
from headstart.commands.serve import _bound, _url
from headstart.infer import Batcher, Recorder, Speculator
from headstart.train.data.parsing import parse_row
from tests.support.chats import TOOLS
from tests.support.served import served, speaker

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="needs fastapi, uvicorn and openai"
)
CONTEXT = 256
ASKED = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
def spoken() -> Any:
    return speaker(CONTEXT)


@pytest.fixture(scope="module", params=[1, 4], ids=["alone", "together"])
def rows(request: pytest.FixtureRequest) -> int:
    """Requests that are decoded together."""
    return request.param


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, rows: int) -> Path:
    return tmp_path_factory.mktemp("served") / "traffic.jsonl"


@pytest.fixture(scope="module")
def client(spoken: Any, record: Path, rows: int) -> Iterator[Any]:
    batcher = Batcher(spoken, rows)
    with served(batcher, Recorder(record, batcher)) as client:
        yield client


def own_text(spoken: Any, new_tokens: int, **sampling: Any) -> str:
    """What `generate` of transformers, or seeded plain decoding, writes."""
    ids = spoken.tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    writer = Speculator(spoken.model) if sampling else spoken.model
    sampling = sampling or {"do_sample": False}
    found = writer.generate(**ids, max_new_tokens=new_tokens, **sampling)
    return spoken.tokenizer.decode(found[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="talker", messages=ASKED, **options)


def test_a_greedy_answer_is_that_of_generate(
    client: Any, spoken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = own_text(spoken, 30)
    found = ask(client, max_tokens=30, temperature=0)
    assert found.choices[0].message.content == expected and expected
    assert found.model == "talker"
    said = capfd.readouterr().err
    assert "tokens in" in said and "τ" in said and ASKED[0]["content"] not in said
    parts = ask(client, max_tokens=30, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected


def recorded(record: Path, count: int) -> list[dict[str, Any]]:
    """So many requests for nine tokens; a line may be written after its stream has ended."""
    limit = time.monotonic() + 20
    while True:
        lines = map(json.loads, record.read_text().splitlines())
        found = [line for line in lines if line["max_new_tokens"] == 9]
        if len(found) >= count:
            return found
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_an_answer_is_recorded_with_its_chat(client: Any, record: Path) -> None:
    found = ask(client, max_tokens=9, temperature=1.1, seed=4)
    list(ask(client, max_tokens=9, temperature=0, stream=True))
    chat, streamed = recorded(record, 2)
    client.completions.create(model="talker", prompt="once upon", max_tokens=9, temperature=0)
    plain = recorded(record, 3)[-1]
    said = {"role": "assistant", "content": found.choices[0].message.content}
    assert chat["messages"] == [*ASKED, said] and len(chat["token_ids"]) <= 9
    assert chat["sampling"]["temperature"] == 1.1 and streamed["sampling"] == {"temperature": 0}
    assert streamed["messages"][:-1] == ASKED and plain["prompt"] == "once upon"


def test_a_chat_that_its_messages_alone_do_not_give_is_recorded_as_its_prompt(
    tmp_path: Path,
) -> None:
    """Rendered again, it would be without its tools, or settings of its template."""
    template = TOOLS + "{% if brief %}brief{% endif %}"
    spoken, file = speaker(CONTEXT, template), tmp_path / "traffic.jsonl"
    batcher, tokenizer = Batcher(spoken, 1), spoken.tokenizer
    assert tokenizer is not None
    tool: Any = {"type": "function", "function": {"name": "find"}}
    with served(batcher, Recorder(file, batcher)) as client:
        for given in ({"tools": [tool]}, {"chat_template_kwargs": {"brief": True}}):
            more: Any = {"logit_bias": {spoken.model.config.eos_token_id: -100}, **given}
            ask(client, max_tokens=9, extra_body=more)
    tools, brief = recorded(file, 2)
    for line, part in ((tools, '"find"'), (brief, "brief")):
        assert "messages" not in line and part in line["prompt"]
        assert tokenizer.encode(line["prompt"]) == line["prompt_token_ids"]
        assert parse_row(line, "0").ids == [line["prompt_token_ids"], line["token_ids"]]


def test_a_temperature_samples_and_a_seed_repeats_it(client: Any, spoken: Any) -> None:
    """Also with others at the same time; it is the text of seeded plain decoding."""
    seeds = [1, 2, 3, 1, 2, 3]

    def one(seed: int) -> str:
        found = ask(client, max_tokens=24, temperature=1.3, seed=seed)
        return found.choices[0].message.content

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(one, seeds))
    assert found[:3] == found[3:] and len(set(found)) == 3
    options = {"do_sample": True, "temperature": 1.3, "seed": 2}
    assert found[1] == own_text(spoken, 24, top_k=0, **options)


def test_without_a_top_k_no_token_is_left_out() -> None:
    """As the protocol has it; `generate` would take the 50 most likely ones."""
    from headstart.serving.handlers import Chats
    from headstart.serving.writing import State

    handler: Any = Chats(None, State())  # type: ignore[arg-type]
    for asked, own, expected in (({}, None, 0), ({}, 50, 50), ({"top_k": 5}, 50, 5)):
        config = handler._build_generation_config(asked, GenerationConfig(top_k=own))
        assert config.top_k == expected


def test_completions_and_responses_have_the_text_too(client: Any, spoken: Any) -> None:
    prompt = "once upon"
    ids = spoken.tokenizer(prompt, return_tensors="pt")
    text = spoken.model.generate(**ids, max_new_tokens=12, do_sample=False)
    expected = spoken.tokenizer.decode(text[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    found = client.completions.create(model="talker", prompt=prompt, max_tokens=12, temperature=0)
    assert found.choices[0].text == expected
    options: dict[str, Any] = {"model": "talker", "input": "say something", "temperature": 0}
    answer = client.responses.create(max_output_tokens=30, **options)  # streamed only if asked
    assert answer.output_text == own_text(spoken, 30)
    with client.responses.create(max_output_tokens=30, stream=True, **options) as events:
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text and len(deltas) > 1


@pytest.mark.parametrize(("stop", "status"), [("no", "incomplete"), ("e", "completed")])
def test_a_response_that_is_cut_says_so(client: Any, stop: str, status: str) -> None:
    settings = {"stop_strings": [stop], "do_sample": False, "pad_token_id": 0}
    options: dict[str, Any] = {"model": "talker", "input": "say something"}
    options |= {"extra_body": {"generation_config": json.dumps(settings)}, "max_output_tokens": 50}
    answer = client.responses.create(**options)
    *_, last = client.responses.create(stream=True, **options)
    assert last.type == f"response.{status}"
    for found in (answer, last.response):
        reason = found.incomplete_details and found.incomplete_details.reason
        assert reason == ("max_output_tokens" if status == "incomplete" else None)
        assert found.status == found.output[0].status == status


def test_a_text_ends_where_the_context_does(client: Any) -> None:
    found = client.completions.create(model="talker", prompt="a" * 250, max_tokens=4000)
    assert found.usage.total_tokens <= CONTEXT
    for prompt, said in (("a" * CONTEXT, "shorten it"), ("", "empty")):
        with pytest.raises(Exception, match=said) as caught:
            client.completions.create(model="talker", prompt=prompt, max_tokens=4)
        assert getattr(caught.value, "status_code", None) == 400


def test_what_cannot_be_answered_is_the_callers_mistake(client: Any) -> None:
    for ask_other in (
        lambda: client.completions.create(model="other", prompt="a"),
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(Exception, match="ask for 'talker'") as caught:
            ask_other()
        assert getattr(caught.value, "status_code", None) == 404
    found = client.models.retrieve("talker")
    assert found.id == "talker" and 0 <= time.time() - found.created < 600
    with pytest.raises(Exception, match="404"):
        client.audio.transcriptions.create(model="talker", file=b"x")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"n": 129}, "n is 129; expected a whole number from 1 to 128"),
        ({"logprobs": 2}, "logprobs is 2; expected true or false"),
        ({"presence_penalty": 3}, "presence_penalty is 3; expected a number from -2 to 2"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens is 0; expected a whole number from 1"),
        ({"temperature": -1}, "temperature is -1; expected a number from 0"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a number from 0 to 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no place for tools"),
    ],
)
def test_what_would_be_ignored_is_refused(client: Any, option: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        ask(client, **({"max_tokens": 2} | option))
    assert getattr(caught.value, "status_code", None) == 400


def test_penalties_of_the_protocol_are_those_of_generate(client: Any, spoken: Any) -> None:
    ids = spoken.tokenizer("once upon", return_tensors="pt")
    asked: dict[str, Any] = {"model": "talker", "prompt": "once upon", "max_tokens": 40}
    texts = set()
    for given in ({}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}):
        text = spoken.generate(**ids, max_new_tokens=40, do_sample=False, **given)
        expected = spoken.tokenizer.decode(
            text[0, ids.input_ids.shape[1] :], skip_special_tokens=True
        )
        found = client.completions.create(**asked, temperature=0, **given).choices[0].text
        assert found == expected
        texts.add(found)
    assert len(texts) == 3
    chat = ask(client, max_tokens=40, temperature=0, frequency_penalty=2).choices[0]
    assert chat.message.content != own_text(spoken, 40)
    more: dict[str, Any] = {"presence_penalty": 1.5, "logit_bias": {"65": 2}, "stop": "q"}
    chat = ask(client, max_tokens=40, temperature=0, **more)
    asked = {"input": ASKED, "max_output_tokens": 40, "temperature": 0}
    found = client.responses.create(model="talker", **asked, extra_body=more)
    assert found.output_text == chat.choices[0].message.content != ""


def test_a_prompt_is_without_the_end_that_a_tokenizer_adds() -> None:
    """Its answer would begin a new text."""
    spoken = speaker(256)
    tokenizer: Any = spoken.tokenizer
    names = ["<s>", "<|im_end|>"]
    added = list(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    tokenizer._tokenizer.post_processor = TemplateProcessing("<s> $A <|im_end|>", None, added)
    asked: dict[str, Any] = {"model": "talker", "max_tokens": 9, "temperature": 0}
    with served(Batcher(spoken, 1)) as client:
        ids = [added[0][1], *tokenizer.encode("hi", add_special_tokens=False)]
        text, same = (client.completions.create(prompt=each, **asked) for each in ("hi", ids))
    assert text.choices[0].text == same.choices[0].text
    assert text.usage.prompt_tokens == same.usage.prompt_tokens == 3


def test_options_that_ask_for_nothing_are_taken(client: Any) -> None:
    given: dict[str, Any] = {"n": 1, "logprobs": False, "presence_penalty": 0, "user": "me"}
    given |= {"response_format": {"type": "text"}, "top_logprobs": 0, "tool_choice": "none"}
    assert ask(client, max_tokens=2, temperature=0, **given).choices[0].message.content


def test_a_stream_ends_as_the_protocol_does(client: Any) -> None:
    body = {"model": "talker", "messages": ASKED, "max_tokens": 3, "stream": True}
    request = urllib.request.Request(
        f"{client.base_url}chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and "total_tokens" in lines[-3]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_tells_its_usage_in_a_chunk_of_its_own_where_that_is_asked(
    client: Any, chat: bool
) -> None:
    options: dict[str, Any] = {"model": "talker", "max_tokens": 3, "stream": True}
    ask_for = client.chat.completions if chat else client.completions
    options |= {"messages": ASKED} if chat else {"prompt": "once upon"}
    *parts, last = ask_for.create(**options, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 3
    assert parts[-1].choices[0].finish_reason == "length"
    assert all(part.usage is None for part in parts)
    *_, last = ask_for.create(**options)
    assert last.choices and last.usage.completion_tokens == 3


def test_a_client_that_leaves_ends_its_request_alone(client: Any, spoken: Any) -> None:
    with ask(client, max_tokens=200, temperature=1.5, seed=5, stream=True) as parts:
        next(iter(parts))
    assert ask(client, max_tokens=30, temperature=0).choices[0].message.content == own_text(
        spoken, 30
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", r"http://127\.0\.0\.1:\d+/v1"),
        ("localhost", r"http://127\.0\.0\.1:\d+/v1"),
        ("", r"http://0\.0\.0\.0:\d+/v1"),
        ("::1", r"http://\[::1\]:\d+/v1"),
        ("::", r"http://\[::\]:\d+/v1"),
    ],
)
def test_hosts_of_both_kinds_are_listened_at(host: str, url: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with _bound(host, 0) as listening:
        assert re.fullmatch(url, _url(listening))
        with socket.create_connection(listening.getsockname()[:2], timeout=10):
            pass


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(
    client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    port = client.base_url.port
    given = ["serve", "--target", "no/such-model", "--host", "127.0.0.1", "--port", str(port)]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "cannot listen at 127.0.0.1" in said and "another --host or --port" in said


def test_a_key_that_is_not_set_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", " ")
    assert main(["serve", "--target", "no/such-model", "--api-key-env", "THE_KEY"]) == 2
    assert "names the variable THE_KEY, which is not set" in capsys.readouterr().err
