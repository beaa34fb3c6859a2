"""Answers tell how many tokens of the prompt were kept from an earlier text."""

from collections.abc import Iterator
from typing import Any

import pytest

from headstart.infer import Batcher, Speculator
from tests.support.served import served, speaker

CHAT: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "tell me"}]}
TEXT: dict[str, Any] = {"model": "talker", "prompt": "some words to go on from"}
INPUT: dict[str, Any] = {"model": "talker", "input": "tell me more"}


@pytest.fixture(params=[1, 4], ids=["alone", "together"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    whole = speaker(512)
    made = Speculator(whole.model, whole.drafter, tokenizer=whole.tokenizer, prefix_caching=True)
    with served(Batcher(made, request.param)) as client:
        yield client


def test_chats(client: Any) -> None:
    create: Any = client.chat.completions.create
    usages = [create(**CHAT, max_tokens=5).usage for _ in range(2)]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert 0 < usages[1].prompt_tokens - usages[1].prompt_tokens_details.cached_tokens < 3
    *_, last = create(**CHAT, max_tokens=5, stream=True)
    assert last.usage == usages[1]
    several = create(**CHAT, max_tokens=5, n=3).usage
    assert several.prompt_tokens_details == usages[1].prompt_tokens_details


def test_the_next_turn_of_a_chat(client: Any) -> None:
    create: Any = client.chat.completions.create
    first = create(**CHAT, max_tokens=40)
    said = [{"role": "assistant", "content": first.choices[0].message.content}]
    more = [*CHAT["messages"], *said, {"role": "user", "content": "and now?"}]
    usage = create(**CHAT | {"messages": more}, max_tokens=5).usage
    text = first.usage.total_tokens
    assert first.usage.prompt_tokens < usage.prompt_tokens_details.cached_tokens <= text


def test_completions(client: Any) -> None:
    usages = [client.completions.create(**TEXT, max_tokens=5).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] == 0 < usages[1].prompt_tokens - cached[1] < 3
    *_, last = client.completions.create(**TEXT, max_tokens=5, stream=True)
    assert last.usage == usages[1]
    both = client.completions.create(**TEXT | {"prompt": [TEXT["prompt"]] * 2}, max_tokens=5).usage
    assert both.prompt_tokens_details.cached_tokens == 2 * cached[1]


def test_responses(client: Any) -> None:
    usages = [client.responses.create(**INPUT, max_output_tokens=16).usage for _ in range(2)]
    cached = [usage.input_tokens_details.cached_tokens for usage in usages]
    assert cached[0] == 0 < usages[1].input_tokens - cached[1] < 3
    *_, last = client.responses.create(**INPUT, max_output_tokens=16, stream=True)
    assert last.response.usage == usages[1]
