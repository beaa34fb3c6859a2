"""Rows with settings of their own are processed as the warpers of transformers do each alone."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from headstart.heads import Sampling
from headstart.heads.core import (
    Before,
    Biased,
    RowSettings,
    note_rows,
    nucleus,
    processors_by_row,
    write_rows,
)
from headstart.heads.core.before import CountPenalty
from headstart.heads.core.row_settings import EachRow
from tests.support.interpreter import run_interpreted, without_triton

SETTINGS = [
    RowSettings(),
    RowSettings(0.7),
    RowSettings(1.3, top_k=5),
    RowSettings(0.9, top_p=0.8),
    RowSettings(0.5, top_k=40, top_p=0.95, min_p=0.02),
    RowSettings(1.0, top_k=100, min_p=0.3),
    RowSettings(0.0),
    RowSettings(1.0, top_p=1e-9),
    RowSettings(2.5, top_k=1),
]


def warpers(settings: RowSettings) -> LogitsProcessorList:
    """As `generate` makes them."""
    found = LogitsProcessorList()
    if settings.temperature not in (0.0, 1.0):
        found.append(hf.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        found.append(hf.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        found.append(hf.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        found.append(hf.MinPLogitsWarper(settings.min_p))
    return found


def each_row(settings: list[RowSettings]) -> EachRow:
    found = EachRow(len(settings))
    found.write(torch.arange(len(settings)), settings)
    found.note(settings)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [30, 700])
def test_each_row_is_processed_as_it_would_be_alone(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(SETTINGS), 4, vocabulary, dtype=dtype, generator=generator) * 3
    logits[:, 0] = logits[:, 0].round()  # equal scores
    together = Sampling(None, LogitsProcessorList([each_row(SETTINGS)]), dtype)
    assert together.rowwise and not together.readers and not together.particular
    for found in (together.warp(logits), together.process_each(logits)):
        for row, settings in enumerate(SETTINGS):
            alone = Sampling(None, warpers(settings), dtype).process_each(logits[row])
            assert torch.equal(found[row], alone), settings


def test_only_what_some_row_needs_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 300)
    for name in ("sort", "topk", "softmax"):
        monkeypatch.setattr(torch.Tensor, name, None)
    row = each_row([RowSettings(0.5), RowSettings(0.0)])
    assert torch.equal(row(None, logits), logits / torch.tensor([[0.5], [1.0]]))
    assert (row.most, row.nucleus, row.least, row.greedy) == (0, False, False, True)
    row.note([RowSettings(1.0, 50, 0.9, 0.1)])
    assert (row.most, row.nucleus, row.least, row.greedy) == (64, True, True, False)


def shares_searched_for() -> dict[str, Any]:
    """The p that the kernel of top-p is given for each row, and whether it changed the scores."""
    from headstart.heads.core import nucleus_kernels

    asked: list[float] = []

    def launch(scores: torch.Tensor, shares: torch.Tensor, filter_value: float) -> torch.Tensor:
        asked.extend(shares.tolist())
        return nucleus_kernels.top_p(scores, shares, filter_value)

    settings = [RowSettings(0.8, top_p=0.9), RowSettings(0.0), RowSettings(1.3)]
    logits = torch.randn(len(settings), 300, generator=torch.Generator().manual_seed(3)) * 3
    sorted_for = each_row(settings)(None, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nucleus, "_has_kernels", lambda scores: True)
        patch.setattr(nucleus, "_launch", launch)
        found = each_row(settings)(None, logits)
    return {"asked": asked, "same": torch.equal(found, sorted_for)}


@without_triton
def test_rows_without_top_p_are_not_searched_for_all_their_tokens() -> None:
    """The kernel bisects a list of the whole vocabulary for a p of 1, and a short one for 0."""
    assert run_interpreted(__name__) == {"asked": [0.9, 0.0, 0.0], "same": True}


@pytest.mark.parametrize("kernels", [False, True])
def test_greedy_rows_take_the_best_token_and_others_draw(kernels: bool) -> None:
    logits, positions = torch.randn(3, 2, 400), torch.tensor([[3, 4]] * 3)
    seeds = torch.tensor([5, 6, 7])
    mixed = [RowSettings(0.8), RowSettings(0.0), RowSettings(1.0, top_k=9)]
    sampling = Sampling(seeds, LogitsProcessorList([each_row(mixed)]), kernels=kernels)
    scores = sampling.process_each(logits)
    found, noisy = sampling.choose(scores, positions), sampling.perturb(scores, positions)
    assert torch.equal(found[1], logits[1].argmax(-1))
    assert torch.equal(noisy[1], logits[1].double())
    for row in (0, 2):
        alone = Sampling(seeds[row : row + 1], warpers(mixed[row]), kernels=kernels)
        own = alone.process_each(logits[row : row + 1])
        assert torch.equal(found[row], alone.choose(own, positions[:1])[0])
        assert torch.equal(noisy[row], alone.perturb(own, positions[:1])[0])
    broken = scores.index_fill(2, torch.tensor([3]), torch.nan)
    assert (sampling.choose(broken, positions) == -1).all()


def test_settings_are_read_from_the_processors_of_generate() -> None:
    for settings in SETTINGS:
        found, sampled = warpers(settings), settings.temperature > 0
        assert RowSettings.of(found, sampled) == settings
        penalised = [hf.RepetitionPenaltyLogitsProcessor(1.2), *found]
        expected = settings._replace(repetition_penalty=1.2)
        assert RowSettings.of(penalised, sampled) == expected  # type: ignore[arg-type]
        of_text: list[Any] = [
            *penalised[:1],
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.MinLengthLogitsProcessor(9, [2, 1]),
            hf.MinNewTokensLengthLogitsProcessor(6, 5, [1, 2]),
            *found,
        ]
        expected = expected._replace(no_repeat_ngram_size=3, min_length=11)
        assert RowSettings.of(of_text, sampled, [1, 2]) == expected
        assert RowSettings.of(of_text, sampled, [1]) is None  # it is about other end tokens
        assert len(settings.apart) == 0 and len(expected.apart) == 3
        biased = Biased.of([(3, 1.5), (5, -2.0)], 9, torch.device("cpu"))
        banned = Biased.of([(5, -math.inf)], 9, torch.device("cpu"))
        of_text = [biased, *of_text[:2], banned, *of_text[2:]]
        expected = expected._replace(token_bias=((3, 1.5), (5, -math.inf)))
        assert RowSettings.of(of_text, sampled, [1, 2]) == expected
        of_text = [*of_text[: -len(found) or None], CountPenalty(0.5, -0.25, 7), *found]
        expected = expected._replace(count_penalty=(0.5, -0.25, 7))
        assert RowSettings.of(of_text, sampled, [1, 2]) == expected
        assert "count_penalty" in expected.apart
    others: list[Any] = [
        [hf.TopKLogitsWarper(5), hf.TemperatureLogitsWarper(0.5)],  # in another order
        [hf.TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [hf.TopKLogitsWarper(5, filter_value=-1e4)],
        [hf.TemperatureLogitsWarper(0.5), hf.TypicalLogitsWarper(0.9)],
        [hf.TemperatureLogitsWarper(0.5), hf.TemperatureLogitsWarper(0.5)],
        [hf.TemperatureLogitsWarper(0.5), hf.RepetitionPenaltyLogitsProcessor(1.2)],
        [hf.TemperatureLogitsWarper(0.5), hf.NoRepeatNGramLogitsProcessor(2)],
        [hf.NoRepeatNGramLogitsProcessor(2), hf.RepetitionPenaltyLogitsProcessor(1.2)],
        [hf.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)],
        [hf.TemperatureLogitsWarper(0.5), CountPenalty(0.5, 0.0, 3)],
    ]
    for processors in others:
        assert RowSettings.of(processors, True) is None
    assert RowSettings.of([hf.TopKLogitsWarper(5)], False) is None


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_row_has_the_penalty_that_transformers_gives_it(
    dtype: torch.dtype, sampled: bool
) -> None:
    penalties, generator = [1.0, 1.05, 2.0, 0.7], torch.Generator().manual_seed(1)
    logits = torch.randn(4, 50, generator=generator, dtype=dtype)
    texts = torch.randint(50, (4, 12), generator=generator)
    found = processors_by_row(4, "cpu", {"repetition_penalty"}, sampled, 50)
    settings = [RowSettings(repetition_penalty=each) for each in penalties]
    write_rows(found, torch.arange(4), settings)
    together = Sampling(None, found, dtype)
    assert not together.rowwise and not together.readers
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, texts, True)
    scores = together.process_each(logits, Before(seen))
    for row, penalty in enumerate(penalties):
        alone = hf.RepetitionPenaltyLogitsProcessor(penalty)
        own = alone(texts[row : row + 1], logits[row : row + 1].clone())  # type: ignore[arg-type]
        assert torch.equal(scores[row : row + 1], own)


def test_each_row_has_its_own_ngrams_and_least_length() -> None:
    """Also one that a row gets later, larger than all before."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 9, generator=generator)
    texts = torch.randint(9, (4, 24), generator=generator)
    lengths = torch.tensor([[24], [20], [9], [16]])
    settings = [
        RowSettings(no_repeat_ngram_size=1),
        RowSettings(min_length=21),
        RowSettings(no_repeat_ngram_size=2, min_length=9),
        RowSettings(),
    ]
    names = {"no_repeat_ngram_size", "min_length"}
    processors = processors_by_row(4, "cpu", names, False, 9, [4, 6])
    for new in (settings, [*settings[:3], RowSettings(no_repeat_ngram_size=3, min_length=17)]):
        write_rows(processors, torch.arange(4), new)
        note_rows(processors, new)
        before = Before(None, texts, lengths)
        found, banned = Sampling(None, processors).process_each(logits, before), 0
        for row, own in enumerate(new):
            text: Any = texts[row : row + 1, : int(lengths[row])]
            expected: Any = logits[row : row + 1]
            if own.no_repeat_ngram_size:
                size = own.no_repeat_ngram_size
                expected = hf.NoRepeatNGramLogitsProcessor(size)(text, expected)
            expected = hf.MinLengthLogitsProcessor(own.min_length, [4, 6])(text, expected)
            assert torch.equal(found[row : row + 1], expected)
            banned += bool(expected.isinf().any())
        assert banned >= 3


def test_each_row_has_its_own_biases_of_tokens() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 3, 9, generator=generator)
    biases: list[dict[int, float]] = [{3: 0.1}, {}, {0: -math.inf, 8: 2.7}, {1: -5.0}]
    settings = [RowSettings(token_bias=tuple(each.items())) for each in biases]
    processors = processors_by_row(4, "cpu", {"token_bias"}, False, 11)
    for rows in (range(4), [3, 2, 1, 0]):  # what a row had before is forgotten
        write_rows(processors, torch.tensor([*rows]), settings)
        together = Sampling(None, processors)
        assert together.rowwise
        found = together.process_each(logits)
        for row, bias in zip(rows, biases, strict=True):
            expected: Any = logits[row]
            if bias:
                alone: Any = hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])
                expected = alone(torch.zeros(3, 1), expected)
            assert torch.equal(found[row], expected)


if __name__ == "__main__":
    print(json.dumps(shares_searched_for()))
