"""Several answers to one request are those of as many requests; prompts may be lists and ids."""

import asyncio
import http.client
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="needs fastapi, uvicorn and openai"
)
ASKED = [{"role": "user", "content": "say something"}]
CHAT: dict[str, Any] = {"model": "talker", "messages": ASKED, "max_tokens": 12}
TEXT: dict[str, Any] = {"model": "talker", "max_tokens": 8, "temperature": 1.2, "seed": 4}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 4}


def test_seeds_of_several_answers_count_up(client: Any) -> None:
    create = client.chat.completions.create
    alone = [create(**CHAT, temperature=1.2, seed=4 + number) for number in range(3)]
    found = create(**CHAT | SAMPLED, n=3)
    assert [each.index for each in found.choices] == [0, 1, 2]
    texts = [each.message.content for each in found.choices]
    assert texts == [each.choices[0].message.content for each in alone] and len(set(texts)) == 3
    reasons = [each.finish_reason for each in found.choices]
    assert reasons == [each.choices[0].finish_reason for each in alone]
    assert found.usage.prompt_tokens == alone[0].usage.prompt_tokens
    written = sum(each.usage.completion_tokens for each in alone)
    assert found.usage.completion_tokens == written
    assert found.usage.total_tokens == written + found.usage.prompt_tokens


@pytest.mark.parametrize("apart", [False, True])
def test_several_answers_are_streamed_in_one_stream(client: Any, apart: bool) -> None:
    create = client.chat.completions.create
    whole = create(**CHAT | SAMPLED, n=3)
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if apart else {}
    parts = list(create(**CHAT | SAMPLED, n=3, stream=True, **more))
    texts, reasons = ["", "", ""], list[Any]([None] * 3)
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [each.message.content for each in whole.choices]
    assert reasons == [each.finish_reason for each in whole.choices]
    told = [part for part in parts if part.usage]
    assert told == parts[-1:] and told[0].usage == whole.usage
    assert (told[0].choices == []) is apart


def test_prompts_may_be_several_and_token_ids(client: Any, spoken: Any) -> None:
    create, texts = client.completions.create, ["once upon", "a time"]
    alone = [create(prompt=text, **TEXT) for text in texts]
    ids = [spoken.tokenizer.encode(text) for text in texts]
    assert create(prompt=ids[0], **TEXT).choices == alone[0].choices
    for prompts in (texts, ids):
        found = create(prompt=prompts, **TEXT)
        assert [each.text for each in found.choices] == [each.choices[0].text for each in alone]
        assert found.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
        two = create(prompt=prompts, n=2, **TEXT)
        assert [each.index for each in two.choices] == list(range(4))
        assert [each.text for each in two.choices[::2]] == [each.text for each in found.choices]
        assert two.choices[1].text != two.choices[0].text
        assert two.usage.prompt_tokens == found.usage.prompt_tokens
    streamed = ["", ""]
    for part in create(prompt=ids, stream=True, **TEXT):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == [each.choices[0].text for each in alone]


def test_an_echo_is_the_prompt_before_the_answer(client: Any, spoken: Any) -> None:
    create = client.completions.create
    plain = create(prompt="once upon", **TEXT)
    for prompt in ("once upon", spoken.tokenizer.encode("once upon")):
        found = create(prompt=prompt, echo=True, **TEXT)
        assert found.choices[0].text == "once upon" + plain.choices[0].text
        assert found.usage == plain.usage
        with create(prompt=prompt, echo=True, stream=True, **TEXT) as parts:
            assert "".join(part.choices[0].text for part in parts) == found.choices[0].text
    both = create(prompt=["once upon", "a time"], echo=True, **TEXT)
    assert both.choices[1].text.startswith("a time") and both.choices[0].text.startswith("once")


def test_all_parts_of_an_answer_have_one_id_and_time(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock goes on meanwhile."""
    import time

    now = itertools.count(1000)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], **TEXT}
    for create, given, begins in (
        (client.chat.completions.create, asked, "chatcmpl-"),
        (client.completions.create, {"prompt": "a", **TEXT}, "cmpl-"),
    ):
        for count in (1, 2):
            parts = list(create(**given, n=count, stream=True))
            assert len(parts) > 2 and len({(part.id, part.created) for part in parts}) == 1
            assert parts[0].id.startswith(begins)
            assert create(**given, n=count).id.startswith(begins)


def test_each_of_several_has_its_own_probabilities(client: Any) -> None:
    found = client.completions.create(prompt=["once upon", "a time"], logprobs=1, n=2, **TEXT)
    for choice in found.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
    parts = client.completions.create(prompt="once upon", logprobs=1, n=2, stream=True, **TEXT)
    told: list[list[float]] = [[], []]
    for choice in (choice for part in parts for choice in part.choices):
        told[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    for own, choice in zip(told, found.choices, strict=False):
        assert own == pytest.approx(choice.logprobs.token_logprobs, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "a", "n": 0}, "n is 0; expected a whole number from 1 to 128"),
        ({"prompt": "a", "n": True}, "n is True; expected a whole number"),
        ({"prompt": ["a"] * 65, "n": 2}, "asks for 130 answers.*; expected at most 128: send"),
        ({"prompt": []}, "prompt is []; expected a text, token ids, or a list of either"),
        ({"prompt": ["a", 1]}, "prompt is ['a', 1]; expected a text, token ids"),
        ({"prompt": [[1], []]}, "prompt is [[1], []]; expected a text, token ids"),
        ({"prompt": [1, 99999]}, "prompt is 99999; expected token ids below "),
        ({"prompt": [-1]}, "prompt is -1; expected token ids below "),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": ["a", "b" * 999]}, "shorten it"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of is 3, which .*; leave it out"),
        ({"prompt": "a", "echo": "yes"}, "echo is 'yes'; expected true or false"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "leave logprobs or echo out"),
    ],
)
def test_what_is_no_prompt_or_number_is_refused(
    client: Any, given: dict[str, Any], said: str, stream: bool
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=30)
    body = json.dumps({"max_tokens": 2, "stream": stream, **given})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    message = json.loads(answer.read())["error"]["message"]
    assert answer.status == 400
    assert all(part in message for part in said.split(".*"))


def test_a_response_is_one(client: Any) -> None:
    with pytest.raises(Exception, match="'n' is no field of this endpoint"):
        client.responses.create(model="talker", input="hi", extra_body={"n": 2})


def test_a_client_that_leaves_ends_every_answer() -> None:
    from headstart.serving.several import merged_stream

    left = list[int]()

    async def answer(number: int) -> AsyncIterator[str]:
        try:
            while True:
                yield 'data: {"choices": [{"index": 0}]}\n\n'
                await asyncio.sleep(0.001)
        finally:
            left.append(number)

    async def leave() -> set[int]:
        stream: Any = merged_stream([answer(0), answer(1)], 2, "name")
        seen = {json.loads((await anext(stream))[6:])["choices"][0]["index"] for _ in range(9)}
        await stream.aclose()
        return seen

    assert asyncio.run(leave()) == {0, 1} and sorted(left) == [0, 1]
