"""By how much text surprises a target: text of its own does not, at the temperature it has."""

from typing import Any

import numpy as np
import pytest
import torch

from headstart.infer import Speculator
from headstart.train.data.training_rows import Row, Rows
from headstart.train.provenance import surprise
from tests.support.tiny import VOCAB, tiny

PROMPT, NEW = 4, 60


def rows_of(text: torch.Tensor) -> Rows:
    taught = np.arange(PROMPT + NEW) >= PROMPT
    return Rows.of(Row(str(i), row.int().numpy(), taught) for i, row in enumerate(text))


def written(temperature: float) -> Rows:
    prompts = torch.randint(1, VOCAB, (32, PROMPT), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 1}
    mask = torch.ones_like(prompts)
    text = Speculator(tiny("llama")).generate(
        prompts, attention_mask=mask, max_new_tokens=NEW, **how
    )
    return rows_of(text)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_own_text_surprises_by_nothing(temperature: float) -> None:
    found = surprise(tiny("llama"), written(temperature), 32, temperature)
    assert abs(found["nats"]) < 4 * found["se"] and found["se"] < 0.1


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_likelier_text_surprises_by_less(temperature: float) -> None:
    found = surprise(tiny("llama"), written(temperature), 32, temperature)
    assert found["nats"] < -4 * found["se"]


def test_text_of_another_surprises() -> None:
    other = torch.randint(1, VOCAB, (32, PROMPT + NEW), generator=torch.Generator().manual_seed(3))
    found = surprise(tiny("llama"), rows_of(other), 32)
    assert found["nats"] > max(0.5, 10 * found["se"])
    hotter = surprise(tiny("llama"), written(2.0), 32, 1.0)
    assert hotter["nats"] > 4 * hotter["se"]
