"""Requests are refused by their bytes only where they cannot fit."""

from types import SimpleNamespace
from typing import Any

import pytest

from headstart.serving.bounds import Bounds
from tests.support.served import speaker

LONG = "x" * 101
BOUNDS = Bounds(1000, 100, 5)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"prompt": "é" * 51},
        {"messages": [{"role": role, "content": "x" * 60} for role in ("system", "user")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"input": LONG},
        {"input": "a", "instructions": LONG},
        {"input": [{"type": "input_text", "text": LONG}]},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": LONG}]},
    ],
)
def test_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="made for 5 tokens in all, which are at most 100 bytes"):
        BOUNDS.check_prompt(body)
    Bounds(1000).check_prompt(body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 100},
        {"messages": [{"role": "assistant", "content": LONG}, {"role": "user", "content": "a"}]},
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": LONG}]}]},
    ],
)
def test_taken(body: dict[str, Any]) -> None:
    BOUNDS.check_prompt(body)


def test_the_bound_is_the_context_full_of_the_longest_token() -> None:
    model: Any = speaker(1 << 12).model
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "é" * 20: 1})
    found = Bounds.of(model, tokenizer)
    assert (found.prompt, found.context) == (40 << 12, 1 << 12)
    assert found.body > 6 * (40 << 12)
    model.config.max_position_embeddings = 0
    assert Bounds.of(model, tokenizer).prompt is None
