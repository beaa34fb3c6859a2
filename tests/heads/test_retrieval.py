"""Retrieval against a plain Python reference, kept and loaded, and in the decode loop."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart
from headstart.cli import main
from headstart.heads import Manifest, OptionError, Step, fingerprint
from headstart.heads.artifacts.saving import save_drafter
from headstart.heads.parts.contexts import in_order
from headstart.heads.retrieval import Retrieval, RetrievalConfig
from tests.support.families import drafter
from tests.support.tiny import VOCAB, one_line, prompts, tiny
from tests.support.weightless import SPARSE, check_no_wait, check_shared_noise, generated

SHAPE: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCAB}


def made(texts: list[list[int]], written: list[list[bool]] | None = None, **options: Any) -> Any:
    """A drafter of some texts, of which every token was written where nothing is said."""
    found = Retrieval(RetrievalConfig(**SHAPE, **options))
    masks = written or [[True] * len(text) for text in texts]
    found.collect(
        (torch.tensor(text), torch.tensor(mask)) for text, mask in zip(texts, masks, strict=True)
    )
    return found


def begun(drafter: Any, *texts: list[int]) -> tuple[Any, Step]:
    """The state and the root's proposals after whole texts."""
    count = torch.tensor([len(text) - 1 for text in texts])
    padded = [text[:-1] + [1] * (int(count.max()) - len(text) + 1) for text in texts]
    state = drafter.start(len(texts), 64)
    drafter.prefill(state, torch.empty(len(texts), len(padded[0]), 0), torch.tensor(padded), count)
    last = torch.tensor([text[-1:] for text in texts])
    given = torch.empty(len(texts), 1, 0), last, torch.ones(len(texts), dtype=torch.long)
    return state, drafter.begin(state, *given)


def chances(step: Step, row: int = 0, node: int = 0) -> dict[int, float]:
    """A node's proposals and their probabilities."""
    assert step.ids is not None and step.log_probs is not None
    ids, probabilities = step.ids[row, node].tolist(), step.log_probs[row, node].exp().tolist()
    there = [token for token in ids if token >= 0]
    assert ids[: len(there)] == there and probabilities == sorted(probabilities, reverse=True)
    return dict(zip(there, probabilities, strict=False))


class Reference:
    """Places and their matches by loops over the texts, as the module's docstring tells it."""

    def __init__(self, texts: list[list[int]], masks: list[list[bool]], longest: int):
        self.places = [  # what leads up to a token that was written, and what follows of it
            (text[:at], text[at : [*mask, False].index(False, at)])
            for text, mask in zip(texts, masks, strict=True)
            for at in range(len(text))
            if mask[at]
        ]
        self.longest = longest

    def match(self, before: list[int], text: list[int]) -> int:
        length = 0
        while length < min(self.longest, len(before), len(text)):
            if before[-1 - length] != text[-1 - length]:
                break
            length += 1
        return length

    def chances(self, text: list[int], path: list[int]) -> dict[int, float]:
        """Of what may follow `text` and `path`, if all places are followed."""
        votes: dict[int, float] = {}
        for before, after in self.places:
            length = self.match(before, text)
            if length and after[: len(path)] == path and len(after) > len(path):
                votes[after[len(path)]] = votes.get(after[len(path)], 0) + 2.0**length
        return {token: vote / sum(votes.values()) for token, vote in votes.items()}


def test_the_example_of_the_docstring() -> None:
    a, b, c, d, x = 1, 2, 3, 4, 9
    found = made([[a, b, c], [a, b, d], [b, d]], [[False, False, True]] * 2 + [[False, True]])
    _, step = begun(found, [x, a, b])
    assert chances(step) == pytest.approx({d: 3 / 5, c: 2 / 5})


@pytest.mark.parametrize("branches", [2, 5, 64])
@pytest.mark.parametrize("longest", [3, 8])
def test_equals_the_reference(longest: int, branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, the root and a chain below it; as many matches as places."""
    monkeypatch.setattr("headstart.heads.parts.contexts._BRANCHES", branches)
    rng, seen = random.Random(longest), 0
    for _ in range(8):
        texts = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(5)]
        masks = [[rng.random() < 0.7 for _ in text] for text in texts]
        reference = Reference(texts, masks, longest)
        found = made(texts, masks, max_match=longest, matches=64)
        asked = [[rng.randrange(3) for _ in range(length)] for length in (2, 5, 12)]
        state, step = begun(found, *asked)
        paths: list[list[int]] = [[] for _ in asked]
        for depth in range(4):
            for row, (text, path) in enumerate(zip(asked, paths, strict=True)):
                expected = reference.chances(text, path)
                assert chances(step, row) == pytest.approx(expected)
                path.append(rng.choice([*expected, 0]))
                seen += len(expected)
            grown = torch.tensor([path[-1:] for path in paths])
            step = found.extend(state, grown, torch.full((3, 1), depth - 1))
    assert seen > 60


def test_the_longest_matches_are_followed() -> None:
    texts = [[rest, 5, 6, 7] for rest in range(8, 28)] + [[4, 5, 6, 8]]
    few = made(texts, [[False, False, False, True]] * len(texts), matches=4)
    _, step = begun(few, [3, 4, 5, 6])
    assert chances(step) == pytest.approx({7: 3 / 5, 8: 2 / 5})  # one of three tokens, and three
    _, step = begun(few, [3, 3, 3, 3])
    assert chances(step) == {}


def test_what_is_committed_is_remembered_and_ended_rows_change_nothing() -> None:
    found = made([[1, 2, 3, 4, 5], [9, 3, 4, 7]], max_match=4)
    state, _ = begun(found, [8, 1], [8, 1])
    tokens, count = torch.tensor([[2, 3, 4], [6, 6, 6]]), torch.tensor([3, 0])
    step = found.begin(state, torch.empty(2, 3, 0), tokens, count)
    assert max(chances(step), key=chances(step).__getitem__) == 5
    assert state.recent[0].tolist() == [1, 2, 3, 4] and state.recent[1].tolist()[-2:] == [8, 1]


def test_no_more_texts_are_kept_than_fit(caplog: pytest.LogCaptureFixture) -> None:
    found = made([[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_tokens=8)
    assert "after the first 8 tokens are left out" in caplog.text
    assert (found.config.tokens, found.config.places) == (8, 6)
    assert chances(begun(found, [4, 5])[1]) == {6: 1.0} and chances(begun(found, [0, 8])[1]) == {}
    nothing = made([])
    assert chances(begun(nothing, [4, 5])[1]) == {}


def test_places_are_ordered_by_their_contexts() -> None:
    rng = random.Random(1)
    text = [-1] * 5 + [rng.choice([-1, 0, 1, 2]) for _ in range(60)]
    places = sorted(rng.sample(range(4, len(text)), 40))
    for length in (1, 2, 3, 5):
        found = in_order(torch.tensor(text), torch.tensor(places), length)
        contexts = [[text[place - back] for back in range(length)] for place in found]
        assert contexts == sorted(contexts) and sorted(found.tolist()) == places


def test_texts_are_saved_loaded_and_pushed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = drafter("retrieval", "tiny")
    manifest = Manifest("retrieval", "tiny-llama", fingerprint(tiny("llama")))
    save_drafter(found, tmp_path / "texts", manifest)
    speculator = headstart.load(tiny("llama"), tmp_path / "texts")
    loaded: Any = speculator.drafter
    assert str(speculator.tree) == "best-first:16,4,8"
    assert torch.equal(loaded.text, found.text) and torch.equal(loaded.order, found.order)
    out = speculator.generate(prompts([9])[0], max_new_tokens=30, do_sample=False)
    assert out.shape == (1, 39)
    place = str(tmp_path / "texts")
    assert main(["push", place, "org/name", "--target-name", "org/model", "--dry-run"]) == 0
    assert "anyone who has it can read them" in capsys.readouterr().err


TREES = ["chain:4", SPARSE, "best-first:9,3,4", "beam:3,4"]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_generate(tree: Any) -> None:
    expected, out, speculator = generated(drafter("retrieval", "tiny"), tree, 4, stop=True)
    assert torch.equal(out, expected) and speculator.stats.tau > 1


@pytest.mark.parametrize("tree", ["chain:3", "best-first:9,3,4"])
def test_sampling_with_shared_noise_is_plain_sampling(tree: str) -> None:
    check_shared_noise(drafter("retrieval", "tiny"), tree)


@pytest.mark.parametrize("options", [{"max_match": 0}, {"matches": 257}, {"max_tokens": 1 << 31}])
def test_bad_options_are_one_line(options: dict) -> None:
    with pytest.raises(OptionError) as caught:
        RetrievalConfig.for_target(tiny("llama"), **options)
    assert f"drafter.{next(iter(options))}" in one_line(caught.value)


def test_a_round_does_not_wait() -> None:
    check_no_wait(drafter("retrieval", "tiny"), "best-first:8,3,3")
