"""What the server tells Prometheus is what its clients saw."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Batcher, Speculator
from tests.support.served import served, speaker

parser: Any = pytest.importorskip("prometheus_client.parser")
if not is_serve_available():
    pytest.skip("needs fastapi, uvicorn and openai", allow_module_level=True)

CHAT: dict[str, Any] = {
    "model": "talker", "messages": [{"role": "user", "content": "a secret"}], "temperature": 0,
}  # fmt: skip


@pytest.fixture
def client() -> Iterator[Any]:
    with served(Batcher(speaker(512), 2)) as client:
        yield client


def told(client: Any) -> dict[str, float]:
    """Each sample by its name without `headstart:`, and by its label beside the model's."""
    text = client.get("../metrics", cast_to=object, options={"headers": {"Accept": "text/plain"}})
    found = {}
    for family in parser.text_string_to_metric_families(str(text)):
        for sample in family.samples:
            others = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
            assert sample.labels["model_name"] == "talker"
            name = sample.name.removeprefix("headstart:")
            found[" ".join([name, *others.values()])] = sample.value
    return found


def test_answers_are_counted(client: Any) -> None:
    answers = [client.chat.completions.create(**CHAT, max_tokens=n) for n in (1, 40)]
    with client.chat.completions.create(**CHAT, max_tokens=40, stream=True) as parts:
        usage = [part.usage for part in parts if part.usage]
    every = [answer.usage for answer in answers] + usage
    found = told(client)
    assert found["prompt_tokens_total"] == sum(each.prompt_tokens for each in every)
    assert found["generation_tokens_total"] == sum(each.completion_tokens for each in every)
    assert found["request_success_total length"] == 3
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_count"] == 3
    assert found["request_time_per_output_token_seconds_count"] == 2
    assert found["e2e_request_latency_seconds_sum"] > found["time_to_first_token_seconds_sum"] > 0
    accepted = found["spec_decode_num_accepted_tokens_total"]
    by_depth = "spec_decode_num_accepted_tokens_per_pos_total"
    depths = [value for name, value in found.items() if name.startswith(by_depth)]
    rounds = found["spec_decode_num_drafts_total"]
    assert accepted == sum(depths) > 0
    assert accepted + rounds >= found["generation_tokens_total"] - 3
    nodes = speaker(512).tree.nodes - 1
    assert found["spec_decode_num_draft_tokens_total"] == rounds * nodes > accepted


def test_tokens_of_prompts_that_are_kept_are_counted() -> None:
    whole = speaker(512)
    made = Speculator(whole.model, whole.drafter, tokenizer=whole.tokenizer, prefix_caching=True)
    with served(Batcher(made, 1)) as client:
        each = [client.chat.completions.create(**CHAT, max_tokens=5).usage for _ in range(2)]
        found = told(client)
    tokens = each[0].prompt_tokens
    assert found["prefix_cache_queries_total"] == 2 * tokens
    assert found["prefix_cache_hits_total"] == tokens - 1  # its last token is run again


def test_requests_that_go_on_or_end_early_are_counted(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.serving.metrics import Watched

    put_round = Watched.put_round

    def slowly(self: Watched, emitted: Any) -> None:
        time.sleep(0.02)
        put_round(self, emitted)

    monkeypatch.setattr(Watched, "put_round", slowly)
    parts = client.chat.completions.create(**CHAT, max_tokens=400, stream=True)
    next(iter(parts))
    during = told(client)
    parts.close()
    limit = time.monotonic() + 30
    while (found := told(client)).get("request_success_total abort", 0) < 1:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert during["num_requests_running"] == 1
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert "secret" not in str(found)
