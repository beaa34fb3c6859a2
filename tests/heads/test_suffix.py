"""Suffix decoding against a plain Python reference, and what it remembers of requests."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import headstart
from headstart.heads import OptionError, Step
from headstart.heads.lookup import Lookup, LookupConfig
from headstart.heads.suffix import Suffix, SuffixConfig
from headstart.infer import Batcher, Speculator
from headstart.infer.measure.bench import bench
from tests.support.tape import decode, on_tape
from tests.support.tiny import VOCAB, one_line, prompts, tiny
from tests.support.weightless import SPARSE, check_no_wait, check_shared_noise, generated

SHAPE: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCAB}
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def suffix(**options: Any) -> Suffix:
    return Suffix(SuffixConfig(**SHAPE, **options))


def of_tiny(**options: Any) -> Suffix:
    return Suffix(SuffixConfig.for_target(tiny("llama"), **options)).eval().bind(tiny("llama"))


def begun(drafter: Suffix, text: list[int]) -> tuple[Any, Step]:
    """The state and the root's proposals after a text."""
    state = drafter.start(1, 64)
    before, last = torch.tensor([text[:-1]]), torch.tensor([text[-1:]])
    drafter.prefill(state, torch.empty(1, len(text) - 1, 0), before, torch.tensor([len(text) - 1]))
    drafter.reserve(state, len(text) - 1, 8)
    return state, drafter.begin(state, torch.empty(1, 1, 0), last, torch.tensor([1]))


def chances(step: Step) -> dict[int, float]:
    """The proposals of a Step's only node, and their probabilities."""
    assert step.ids is not None and step.log_probs is not None
    ids, probabilities = step.ids[0, 0].tolist(), step.log_probs[0, 0].exp().tolist()
    return {token: chance for token, chance in zip(ids, probabilities, strict=True) if token >= 0}


def remember(drafter: Suffix, prompt: list[int], answer: list[int]) -> None:
    drafter.remember(torch.tensor(prompt + answer), len(prompt))


class Reference:
    """The votes by loops over the request's text and the answers, if all places are followed."""

    def __init__(self, answers: list[tuple[list[int], list[int]]], longest: int):
        self.longest = longest
        self.places = [  # what leads up to a token that was written, and what follows
            ((prompt[-longest:] + answer)[: len(prompt[-longest:]) + at], answer[at:])
            for prompt, answer in answers
            for at in range(len(answer))
        ]

    def match(self, before: list[int], text: list[int]) -> int:
        most, length = min(self.longest, len(before), len(text)), 0
        while length < most and before[-1 - length] == text[-1 - length]:
            length += 1
        return length

    def chances(self, text: list[int], path: list[int]) -> dict[int, float]:
        found = list(self.places)
        for end in range(1, len(text)):  # its own text goes round
            after = text[end:]
            found.append((text[:end], [after[j % len(after)] for j in range(len(path) + 1)]))
        votes: dict[int, float] = {}
        for before, after in found:
            length = self.match(before, text)
            if length and after[: len(path)] == path and len(after) > len(path):
                votes[after[len(path)]] = votes.get(after[len(path)], 0) + 2.0**length
        return {token: vote / sum(votes.values()) for token, vote in votes.items()}


def test_the_example_of_the_docstring() -> None:
    a, b, c, d, x, y, z = range(1, 8)
    drafter = suffix()
    for before, after in ((x, c), (y, d), (z, d)):
        remember(drafter, [before], [a, b, after])
    _, step = begun(drafter, [9, y, a, b])
    assert chances(step) == pytest.approx({d: (8 + 4) / 16, c: 4 / 16})
    _, step = begun(drafter, [a, b, x, x, y, a, b])  # and after `a b` of its own
    assert chances(step) == pytest.approx({d: 12 / 20, c: 4 / 20, x: 4 / 20})


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("branches", [3, 64])
@pytest.mark.parametrize("longest", [2, 7])
def test_equals_the_reference(
    longest: int, branches: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the root and a chain below it, with more answers from one text to the next."""
    monkeypatch.setattr("headstart.heads.parts.matches.AT_ONCE", at_once)
    monkeypatch.setattr("headstart.heads.parts.contexts._BRANCHES", branches)
    monkeypatch.setattr("headstart.heads.suffix._AT_ONCE", 3)
    rng, seen = random.Random(longest), 0
    drafter, answers = suffix(max_match=longest, matches=200), []

    def some(most: int) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(1, most))]

    for _ in range(12):
        answers.append((some(9), some(12)))
        remember(drafter, *answers[-1])
        reference, text, path = Reference(answers, longest), [*some(1), *some(14)], []
        state, step = begun(drafter, text)
        for depth in range(4):
            expected = reference.chances(text, path)
            assert chances(step) == pytest.approx(expected)
            seen += len(expected)
            path.append(rng.choice([*expected, 0]))
            step = drafter.extend(state, torch.tensor([path[-1:]]), torch.tensor([[depth - 1]]))
    assert seen > 60


def test_the_oldest_answers_make_room() -> None:
    """Places that are left are those of whole contexts, in order; what was overwritten is gone."""
    rng, size = random.Random(4), 260
    drafter = suffix(max_match=5, max_tokens=size)
    for number in range(60):
        prompt, answer = ([rng.randrange(4) for _ in range(rng.randint(1, 40))] for _ in range(2))
        remember(drafter, prompt, answer)
        count = int(drafter.count)
        places, kept = drafter.order[:count].tolist(), drafter.answers.tolist()
        assert len(set(places)) == count and (drafter.order[count:] == 5).all()
        contexts = [[kept[place - back] for back in range(5)] for place in places]
        assert contexts == sorted(contexts)
        assert all(kept[place + 1] >= 0 for place in places)
        begin = drafter._next - len(answer) - 1
        assert kept[begin : drafter._next] == [*answer, -1]
        assert {*range(begin - 1, drafter._next - 2)} <= set(places)
        assert number < 30 or size // 4 < count < size


@pytest.mark.parametrize("answer", [200, 254, 255, 300, 2000])
def test_of_an_answer_that_is_too_long_the_end_is_kept(answer: int) -> None:
    drafter = suffix(max_match=4, max_tokens=256)
    text = [number % 50 for number in range(answer)]
    for _ in range(2):
        remember(drafter, [60, 61], text)
        assert chances(begun(drafter, text[-4:-1])[1]) == {text[-1]: 1.0}
    assert 150 < int(drafter.count) <= 251


def test_nothing_is_remembered_of_an_answer_without_tokens() -> None:
    drafter = suffix()
    remember(drafter, [1, 2, 3], [])
    assert not drafter.count and chances(begun(drafter, [1, 2])[1]) == {}


def test_it_forgets() -> None:
    drafter = suffix()
    remember(drafter, [1, 2], [3, 4])
    assert chances(begun(drafter, [1, 2])[1]) == {3: 1.0}
    drafter.forget()
    assert chances(begun(drafter, [1, 2])[1]) == {}
    remember(drafter, [1, 2], [5])
    assert chances(begun(drafter, [1, 2])[1]) == {5: 1.0}


TREES = ["chain:4", SPARSE, "best-first:9,3,4", "beam:3,4", None]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_generate(tree: Any, batch: int) -> None:
    drafter, taus = of_tiny(), []
    for _ in range(2):
        expected, out, speculator = generated(drafter, tree, batch, stop=True)
        assert torch.equal(out, expected)
        taus.append(speculator.stats.tau)
    assert taus[1] > max(taus[0], 2)  # it has seen the answer


def test_sampling_with_shared_noise_is_plain_sampling() -> None:
    drafter = of_tiny()
    for _ in range(2):
        check_shared_noise(drafter, "best-first:9,3,4")
    assert drafter.count


def test_answers_are_remembered_as_they_were_written() -> None:
    """Of rows with padding, an end token and prompts of different lengths."""
    model, (ids, mask) = tiny("llama"), prompts([13, 3, 10])
    plain = model.generate(ids, attention_mask=mask, eos_token_id=None, **OPTIONS)
    end = plain[1, 20].item()
    noted: list[tuple[list[int], int]] = []

    class Noting(Suffix):
        def remember(self, tokens: Tensor, prompt: int) -> None:
            noted.append((tokens.tolist(), prompt))
            super().remember(tokens, prompt)

    drafter = Noting(SuffixConfig.for_target(model)).eval().bind(model)
    options = {**OPTIONS, "eos_token_id": end}
    text = Speculator(model, drafter).generate(ids, attention_mask=mask, **options)
    expected = []
    for row, length in enumerate((13, 3, 10)):
        new = text[row, 13:].tolist()
        new = new[: new.index(end) + 1] if end in new else new
        expected.append((ids[row, 13 - length :].tolist() + new, length))
    assert noted == expected and any(len(tokens) - prompt < 20 for tokens, prompt in noted)
    noted.clear()
    batcher = Batcher(Speculator(model, drafter), rows=2)
    for row, (_, length) in enumerate(expected):
        batcher.generate(ids[row : row + 1, 13 - length :], **options)
    assert noted == expected
    speculator = Speculator(model, drafter)
    speculator.remembers = False
    speculator.generate(ids, attention_mask=mask, **options)
    assert noted == expected


def test_captured_rounds_read_what_was_remembered_since() -> None:
    drafters = of_tiny(), of_tiny()
    replayed, written = (Speculator(tiny("llama"), each, tree="chain:3") for each in drafters)
    tape, taus = on_tape(replayed), []
    for turn in (0, 1, 0, 1):
        assert torch.equal(decode(replayed, turn=turn), decode(written, turn=turn))
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist()
        taus.append(replayed.stats.tau)
    assert tape.replayed and min(taus[2:]) > max(taus[:2])
    for name in ("answers", "order", "count"):
        assert torch.equal(*(getattr(each, name) for each in drafters))


def test_a_measurement_drafts_from_no_answer_that_it_is_about_to_write() -> None:
    drafter, (row, other) = of_tiny(), prompts([12, 12])[0]
    remember(drafter, [1], [2, 3])
    speculator = Speculator(tiny("llama"), drafter)
    tau = bench(speculator, [row, other, row], 20, repeats=2)["tau_by_prompt"]
    drafter.forget()
    speculator.remembers = False
    mask = torch.ones_like(row[None])
    speculator.generate(row[None], attention_mask=mask, eos_token_id=None, **OPTIONS)
    assert tau[0] == speculator.stats.tau < tau[2] and speculator.remembers is False
    assert bench(speculator, [row], 20, repeats=2)["tau_by_prompt"] == tau[:1]


def test_requests_in_threads_share_what_is_remembered() -> None:
    model, drafter = tiny("llama"), of_tiny(max_tokens=300)
    batcher, (ids, mask) = Batcher(Speculator(model, drafter), rows=4), prompts([13, 7, 10, 3])
    others = [Speculator(model, drafter, tree="chain:4") for _ in range(2)]
    expected = model.generate(ids, attention_mask=mask, eos_token_id=None, **OPTIONS)
    wrong: list[Any] = []

    def ask(decoder: Any, row: int) -> None:
        for _ in range(4):
            given = ids[row : row + 1, mask[row].argmax() :]
            text = decoder.generate(given, eos_token_id=None, **OPTIONS)
            if text[0, given.shape[1] :].tolist() != expected[row, 13:].tolist():
                wrong.append(row)

    asked = [(batcher, row) for row in range(4)] + [(each, 1) for each in others]
    threads = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and drafter.count


def test_with_nothing_remembered_it_is_lookup_on_a_chain() -> None:
    """Where one match is followed, whose votes elect its own token."""
    model = tiny("llama")
    lookup = Lookup(LookupConfig.for_target(model, max_match=16, matches=1)).bind(model)
    _, text, ours = generated(of_tiny(matches=1), "chain:4", 1, stop=False)
    _, theirs, looked = generated(lookup, "chain:4", 1, stop=False)
    assert torch.equal(text, theirs)
    assert ours.stats.counts.tolist() == looked.stats.counts.tolist()


def test_it_is_loaded_by_name() -> None:
    speculator = headstart.load(tiny("llama"), ["suffix", "recycling"])
    suffix, _ = speculator.drafters.drafters
    assert isinstance(suffix, Suffix) and suffix.default_tree == "best-first:16,4,8"
    out = speculator.generate(prompts([9])[0], max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 14) and int(suffix.count) == 5


@pytest.mark.parametrize("options", [{"max_match": 65}, {"matches": 0}, {"max_tokens": 255}])
def test_bad_options_are_one_line(options: dict) -> None:
    with pytest.raises(OptionError) as caught:
        SuffixConfig.for_target(tiny("llama"), **options)
    assert f"drafter.{next(iter(options))}" in one_line(caught.value)


def test_a_round_does_not_wait() -> None:
    ids, mask = prompts([9, 4, 7])
    drafter = of_tiny()
    Speculator(tiny("llama"), drafter).generate(ids, attention_mask=mask, **OPTIONS)
    check_no_wait(drafter, "best-first:8,3,3")
