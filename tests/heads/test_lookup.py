"""Prompt lookup against a plain Python reference, and in the decode loop."""

import random
from typing import Any

import pytest
import torch

import headstart
from headstart.heads import OptionError, Step
from headstart.heads.lookup import Lookup, LookupConfig
from tests.support.tiny import VOCAB, one_line, prompts, tiny
from tests.support.weightless import SPARSE, check_no_wait, check_shared_noise, generated

SHAPE: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCAB}


def lookup(**options: Any) -> Lookup:
    return Lookup(LookupConfig(**SHAPE, **options))


class Reference:
    """One row's matches by loops over its text, as the docstring of the module tells it."""

    def __init__(self, text: list[int], config: LookupConfig):
        self.text, last = text, len(text) - 1
        found = []
        for end in range(last):
            length = 0
            while length < config.max_match and end - length >= 0:
                if text[end - length] != text[last - length]:
                    break
                length += 1
            if length >= config.min_match:
                found.append((length, end))
        self.ends = [end for _, end in sorted(found, reverse=True)][: config.matches]

    def continuation(self, end: int, length: int) -> list[int]:
        after = self.text[end + 1 :]
        return [after[j % len(after)] for j in range(length)]

    def candidates(self, path: list[int]) -> list[int]:
        """What may follow the root and `path`, best first."""
        following = [self.continuation(end, len(path) + 1) for end in self.ends]
        agreeing = [tokens[-1] for tokens in following if tokens[:-1] == path]
        return list(dict.fromkeys(agreeing))


def check_round(drafter: Lookup, state: Any, step: Step, texts: list[list[int]], rng: Any) -> int:
    """Compare candidates of the root and two grown levels with the reference; count them."""
    references = [Reference(text, drafter.config) for text in texts]
    paths: list[list[list[int]]] = [[[]] for _ in texts]  # of each row: root, then grown nodes
    fresh, seen = [[0] for _ in texts], 0  # entries of `paths` that `step` answers for
    for level in range(3):
        assert step.ids is not None
        for row, reference in enumerate(references):
            for place, entry in enumerate(fresh[row]):
                expected = reference.candidates(paths[row][entry])
                found = step.ids[row, place].tolist()
                assert found == expected + [-1] * (len(found) - len(expected))
                seen += len(expected)
        if level == 2:
            return seen
        width = rng.choice([1, 3])
        tokens, parents = torch.zeros(len(texts), width).long(), torch.zeros(len(texts), width)
        for row, reference in enumerate(references):
            above, fresh[row] = fresh[row], []
            for node in range(width):
                entry = rng.choice(above)
                known = reference.candidates(paths[row][entry])
                token = rng.choice(known) if known and rng.random() < 0.8 else rng.randrange(3)
                tokens[row, node], parents[row, node] = token, entry - 1
                fresh[row].append(len(paths[row]))
                paths[row].append([*paths[row][entry], token])
        step = drafter.extend(state, tokens, parents.long())
    return seen


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("slack", [0, 40], ids=["tight", "loose"])
@pytest.mark.parametrize(
    "options", [{}, {"min_match": 3}, {"max_match": 2, "matches": 3}, {"max_match": 40}]
)
def test_equals_the_reference(
    options: dict, slack: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths and a small alphabet, past two growths of the buffer; ragged."""
    monkeypatch.setattr("headstart.heads.parts.matches.AT_ONCE", at_once)
    rng, drafter = random.Random(7), lookup(**options)
    texts = [[rng.randrange(3) for _ in range(length)] for length in (30, 1, 9, 55)]
    count = torch.tensor([len(text) for text in texts])
    state, longest = drafter.start(4, 4096), int(count.max())
    padded = [text + [1] * (longest - len(text)) for text in texts]
    drafter.prefill(state, torch.empty(4, longest, 0), torch.tensor(padded), count)
    seen = 0
    for turn in range(40):
        added = 5 if turn else 1
        tokens = torch.tensor([[rng.randrange(3) for _ in range(added)] for _ in texts])
        # Row 2 ends early; what stands behind a row's count is no text.
        count = torch.tensor([rng.randint(1, added) for _ in texts])
        count[2] *= turn < 6
        for row, text in enumerate(texts):
            text += tokens[row, : count[row]].tolist()
        drafter.reserve(state, max(map(len, texts)) - 1 + slack, 5)
        step = drafter.begin(state, torch.empty(4, added, 0), tokens, count)
        if turn % 3 == 0 or turn > 36:
            seen += check_round(drafter, state, step, texts, rng)
    assert seen > 300 and state.text.shape[1] > 128


def test_a_repeating_text_goes_round() -> None:
    """The example of the module's docstring, and its continuation."""
    drafter = lookup()
    state = drafter.start(1, 64)
    drafter.prefill(state, torch.empty(1, 4, 0), torch.tensor([[5, 6, 7, 5]]), torch.tensor([4]))
    drafter.reserve(state, 5, 1)
    step = drafter.begin(state, torch.empty(1, 1, 0), torch.tensor([[6]]), torch.tensor([1]))
    for parent, token in enumerate([7, 5, 6, 7, 5], start=-1):
        assert step.ids is not None and step.ids[0, 0, :2].tolist() == [token, -1]
        step = drafter.extend(state, torch.tensor([[token]]), torch.tensor([[parent]]))
    drafter.reserve(state, 6, 1)
    nothing = drafter.begin(state, torch.empty(1, 1, 0), torch.tensor([[9]]), torch.tensor([1]))
    assert nothing.ids is not None and (nothing.ids == -1).all()


TREES = ["chain:4", "cartesian:3,2,1", SPARSE, "best-first:9,3,4", "beam:3,4"]


@pytest.mark.parametrize("stop", [False, True], ids=["length", "eos"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_generate(tree: Any, batch: int, stop: bool) -> None:
    expected, out, speculator = generated(lookup(), tree, batch, stop)
    assert torch.equal(out, expected)
    assert stop or batch == 1 or speculator.stats.tau > 1


@pytest.mark.parametrize("tree", ["chain:3", "cartesian:3,2"])
def test_sampling_with_shared_noise_is_plain_sampling(tree: str) -> None:
    check_shared_noise(lookup(), tree)


@pytest.mark.parametrize(
    "options", [{"min_match": 0}, {"min_match": 9}, {"matches": 0}, {"max_match": 0}]
)
def test_bad_options_are_one_line(options: dict) -> None:
    with pytest.raises(OptionError) as caught:
        LookupConfig.for_target(tiny("llama"), **options)
    assert "min_match" in one_line(caught.value)


def test_it_is_loaded_by_name() -> None:
    speculator = headstart.load(tiny("llama"), "lookup")
    assert isinstance(speculator.drafter, Lookup) and str(speculator.tree) == "chain:4"
    out = speculator.generate(prompts([9])[0], max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 14)


@pytest.mark.parametrize("tree", ["chain:4", "cartesian:3,2,1"])
def test_a_round_does_not_wait(tree: str) -> None:
    check_no_wait(lookup().bind(tiny("llama")), tree)
