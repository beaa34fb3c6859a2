"""Presence and frequency penalties take off what a plain loop takes off, in trees and batches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.core import CountPenalty
from headstart.infer import Batcher, Speculator
from tests.support.families import TREES, drafter
from tests.support.tape import on_tape
from tests.support.tiny import VOCAB, one_line, prompts, tiny

LENGTHS = [9, 4, 7]
NEW = 24
PENALTIES: list[dict[str, float]] = [
    {"presence_penalty": 4.0},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -2.0, "frequency_penalty": 3.0},
]
HOW: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}


def by_hand(prompt: list[int], penalties: dict[str, float], counted_from: int) -> list[int]:
    """Greedy decoding of one prompt, a forward for each token, in float64."""
    text, model = list(prompt), tiny("llama")
    for _ in range(NEW):
        with torch.no_grad():
            scores = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        for token in range(VOCAB):
            if times := text[counted_from:].count(token):
                scores[token] -= penalties.get("presence_penalty", 0)
                scores[token] -= penalties.get("frequency_penalty", 0) * times
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


def speculator(graphs: bool = False, **options: Any) -> Speculator:
    found = Speculator(tiny("llama"), drafter("medusa", "tiny"), tree=TREES[1], **options)
    if graphs:
        on_tape(found)
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("penalties", PENALTIES, ids=["presence", "frequency", "both"])
def test_greedy_text_is_that_of_a_plain_loop(penalties: dict[str, float], graphs: bool) -> None:
    """New tokens alone are counted, those of each node's own path. The controls count the prompt,
    or nothing."""
    (ids, mask), ours = prompts(LENGTHS), speculator(graphs)
    found = ours.generate(ids, attention_mask=mask, do_sample=False, **HOW, **penalties)
    rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    new = found[:, ids.shape[1] :].tolist()
    assert new == [by_hand(row, penalties, len(row)) for row in rows]
    assert new != [by_hand(row, penalties, 0) for row in rows]
    assert new != [by_hand(row, {}, 0) for row in rows]
    assert ours.stats.tau > 1
    assert not graphs or (ours.graphs is not None and ours.graphs.replayed > 0)


def asked(number: int) -> dict[str, Any]:
    """How a request is decoded: with penalties of its own or without, greedily or sampled."""
    penalties = [{}, *PENALTIES][number % 4]
    sampled = {"do_sample": True, "temperature": 0.8, "seed": number}
    return {**HOW, **penalties, **(sampled if number % 3 else {"do_sample": False})}


@pytest.mark.parametrize("graphs", [False, True])
def test_each_row_of_a_batch_has_its_own(graphs: bool) -> None:
    """A row has several requests, one after another; a batch that starts anew counts on."""
    from concurrent.futures import ThreadPoolExecutor

    batcher = Batcher(speculator(graphs), rows=3)
    alone, (ids, _) = Speculator(tiny("llama")), prompts([6] * 8)

    def one(number: int) -> Tensor:
        row = ids[number : number + 1, number % 4 :]  # of several lengths
        return batcher.generate(row, **asked(number) | {"max_new_tokens": NEW + 4 * number})

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    for number, text in enumerate(found):
        row = ids[number : number + 1, number % 4 :]
        expected = alone.generate(row, **asked(number) | {"max_new_tokens": NEW + 4 * number})
        assert torch.equal(text, expected)


@pytest.mark.parametrize("rule", [None, "match"])
def test_sampled_text_is_that_of_plain_decoding(rule: str | None) -> None:
    (ids, mask), how = prompts(LENGTHS), {**HOW, "do_sample": True, "seed": 7, "top_k": 0}
    ours, plain = speculator(rule=rule), Speculator(tiny("llama"))
    texts = [
        [each.generate(ids, attention_mask=mask, **how, **penalties) for penalties in PENALTIES]
        for each in (ours, plain)
    ]
    assert all(map(torch.equal, *texts))
    free = plain.generate(ids, attention_mask=mask, **how)
    assert not any(torch.equal(text, free) for text in texts[0])


def test_other_processors_follow() -> None:
    """As for `repetition_penalty`; among those that read the text, too."""

    class Last:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter_add(1, input_ids[:, -1:], torch.full_like(scores[:, :1], 1.5))

    (ids, mask), ours, model = prompts(LENGTHS), speculator(), tiny("llama")
    penalty: Any = CountPenalty(0.6, 0.4, ids.shape[1])
    options: dict[str, Any] = {**HOW, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, logits_processor=[penalty, Last()], **options)
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    found = ours.generate(ids, logits_processor=[Last()], **penalties, **options)  # type: ignore[list-item]
    assert torch.equal(found, expected)
    assert not torch.equal(found, model.generate(ids, logits_processor=[Last()], **options))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True])
def test_what_is_no_number_is_refused(value: Any) -> None:
    ids, _ = prompts([6])
    for name in ("presence_penalty", "frequency_penalty"):
        with pytest.raises(OptionError, match=f"{name} is .*; expected a number") as caught:
            speculator().generate(ids, max_new_tokens=2, **{name: value})
        assert one_line(caught.value)
