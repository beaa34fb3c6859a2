"""Rows of logits with texts of their own are processed as transformers processes each alone."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from headstart.heads import Sampling
from headstart.heads.core import Before, CountPenalty, repeating
from headstart.heads.core.before import Unended
from headstart.infer.rules.rule_api import seen_in

VOCAB = 7
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = torch.randint(VOCAB + 3, (40, 30), generator=GENERATOR)  # some ids have no logits
LENGTHS = torch.randint(1, 31, (40, 1), generator=GENERATOR)
LOGITS = torch.randn(40, VOCAB, generator=GENERATOR)


def alone(item: Any, row: int) -> Any:
    text = TEXTS[row : row + 1, : int(LENGTHS[row])]
    return item(text, LOGITS[row : row + 1].clone())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 31])
def test_ngrams_of_one_size(size: int) -> None:
    item: Any = hf.NoRepeatNGramLogitsProcessor(size)
    together = Sampling(None, LogitsProcessorList([item]))
    assert together.of_text and not together.readers and not together.rowwise
    found = together.process_each(LOGITS, Before(None, TEXTS, LENGTHS))
    banned = 0
    for row in range(len(TEXTS)):
        assert torch.equal(found[row : row + 1], alone(item, row))
        banned += int(found[row].isinf().sum())
    assert (banned > 0) == (size < 5)


def test_ngrams_of_a_size_for_each_row() -> None:
    sizes = torch.arange(40).remainder(5).unsqueeze(1)
    found = repeating(TEXTS, LENGTHS, sizes, 8, VOCAB)
    for row in range(len(TEXTS)):
        size = int(sizes[row])
        item: Any = hf.NoRepeatNGramLogitsProcessor(size or 1)
        expected = alone(item, row).isinf() if size else torch.zeros(1, VOCAB, dtype=torch.bool)
        assert torch.equal(found[row : row + 1], expected)


@pytest.mark.parametrize("ends", [[3], [2, 5, VOCAB + 1], [-1]])
def test_no_end_before_a_length(ends: list[int]) -> None:
    least: Any = hf.MinLengthLogitsProcessor(12, ends)
    new: Any = hf.MinNewTokensLengthLogitsProcessor(4, 5, ends)
    unended: Any = Unended(torch.full((1, 1), 12), torch.tensor(ends))
    for item, same in ((least, least), (new, new), (unended, least)):
        together = Sampling(None, LogitsProcessorList([item]))
        found = together.process_each(LOGITS, Before(None, TEXTS, LENGTHS))
        for row in range(len(TEXTS)):
            assert torch.equal(found[row : row + 1], alone(same, row))
        assert bool(found.isinf().any()) == (ends != [-1])


def test_counted_tokens_cost_what_they_cost_alone() -> None:
    """By one penalty for all, or one for each row."""
    numbers = [(0.5 * row, 0.25 * (row % 3), row % 9) for row in range(len(TEXTS))]
    every = CountPenalty.by_row(len(TEXTS))
    every.write(torch.arange(len(TEXTS)), numbers)
    one = CountPenalty(1.25, -0.5, 4)
    for item, alike in ((one, [(1.25, -0.5, 4)] * len(TEXTS)), (every, numbers)):
        together = Sampling(None, LogitsProcessorList([item]))
        assert together.of_text and not together.readers and not together.particular
        found = together.process_each(LOGITS, Before(None, TEXTS, LENGTHS))
        for row, own in enumerate(alike):
            assert torch.equal(found[row : row + 1], alone(CountPenalty(*own), row))
    text = torch.tensor([[5, 1, 5, 5, 8]])
    found = CountPenalty(1.0, 0.5, 1)(text, torch.zeros(1, VOCAB))
    assert found.tolist() == [[0.0, -1.5, 0.0, 0.0, 0.0, -2.0, 0.0]]


def test_several_apply_in_their_order_and_a_reader_takes_all() -> None:
    items: list[Any] = [
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.MinLengthLogitsProcessor(9, [3]),
        CountPenalty(0.5, 0.25, 3),
        hf.TemperatureLogitsWarper(0.7),
    ]
    together = Sampling(None, LogitsProcessorList(items))
    texts = TEXTS.clamp(max=VOCAB - 1)
    beyond = torch.arange(TEXTS.shape[1]) >= LENGTHS
    seen = seen_in(texts.masked_fill(beyond, VOCAB), VOCAB)[:, :VOCAB]
    found = together.process_each(LOGITS, Before(seen, texts, LENGTHS))
    for row in range(len(TEXTS)):
        text: Any = texts[row : row + 1, : int(LENGTHS[row])]
        expected = LogitsProcessorList(items)(text, LOGITS[row : row + 1].clone())  # type: ignore[arg-type]
        assert torch.equal(found[row : row + 1], expected)
    reader: Any = hf.SequenceBiasLogitsProcessor([[[1, 2], 3.0]])
    mixed = Sampling(None, LogitsProcessorList([*items, reader]))
    assert mixed.readers == (reader,) and not mixed.of_text
