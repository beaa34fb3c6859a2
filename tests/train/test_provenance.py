"""By how much text surprises a target: text of its own does not, at the temperature it has."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headstart.infer import Speculator
from headstart.train import provenance
from headstart.train.data.training_rows import Row, Rows
from headstart.train.provenance import mean_loss, surprise
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


@pytest.mark.parametrize("knows", [True, False])
def test_few_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch, knows: bool) -> None:
    """Of long texts with a large vocabulary, all of them would take more memory than a target."""
    model = copy.deepcopy(tiny("llama"))
    if not knows:
        forward = model.forward
        model.forward = lambda input_ids, use_cache: forward(input_ids, use_cache=use_cache)
    texts = [torch.arange(1, length) for length in (30, 9, 21)]
    masks = [text % 5 > 1 for text in texts]
    masks[1][:] = False
    expected = []
    for text, mask in zip(texts, masks, strict=True):
        with torch.no_grad():
            logits = model(input_ids=text[None], use_cache=False).logits[0, :-1].float()
        losses = functional.cross_entropy(logits, text[1:], reduction="none")
        expected.append(losses[mask[1:]])
    rows = Rows.of(Row("", *(x.numpy() for x in pair)) for pair in zip(texts, masks, strict=True))
    whole, sizes = surprise(model, rows, 3), []

    def note(layer: Any, given: Any, made: Tensor) -> None:
        sizes.append(made.shape[1])

    monkeypatch.setattr(provenance, "_AT_ONCE", 5 * VOCAB)
    with model.lm_head.register_forward_hook(note):
        found = mean_loss(model, texts, masks)
        assert surprise(model, rows, 3) == pytest.approx(whole, abs=1e-4)
    assert found["nats"] == pytest.approx(float(torch.cat(expected).mean()), abs=1e-4)
    assert found["tokens"] == sum(map(len, expected)) and (max(sizes) == 5) is knows
