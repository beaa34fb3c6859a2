"""Ways to decode that are timed against each other."""

from typing import Any

import pytest

from headstart.infer import Speculator
from headstart.infer.measure.baselines import decode_in_turns, timed_generate, timed_speculator
from tests.support.tiny import prompts, tiny


def test_first_tokens_of_an_assistant_come_together() -> None:
    """A time per token leaves out those that came before the clock was started."""
    target: Any = tiny("llama")
    ids, _ = prompts([12])
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    student: Any = tiny("llama")  # it proposes what the target says
    student.generation_config.num_assistant_tokens = 4
    student.generation_config.num_assistant_tokens_schedule = "constant"
    student.generation_config.assistant_confidence_threshold = 0.0
    decoders = {
        "plain": timed_speculator(Speculator(target), **options),
        "assistant": timed_generate(target, **options, assistant_model=student),
    }
    ((_, runs),) = decode_in_turns(decoders, [ids], target.device, repeats=1)
    assert runs["assistant"].tokens == runs["plain"].tokens
    assert (runs["plain"].first, runs["assistant"].first) == (1, 5)
    taken = runs["assistant"].decode_ms
    assert runs["assistant"].per_token == pytest.approx(taken / (9 - 5))
