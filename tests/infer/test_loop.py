"""The loop: rows of their own, cuts at ends and budgets, stopping criteria, counting, the cache."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

from headstart.heads import Step
from headstart.heads.core import CACHE, masks
from headstart.infer import Decoding, Speculator, target
from tests.support.scripted import Heads, Script, Scripted, decoding_of, make, rows_of
from tests.support.tiny import CONFIGS, VOCAB, letters, prompts, tiny

NEW = 20
LENGTHS = [9, 4, 7, 12]
TREES = {"chain": "chain:4", "cartesian": "cartesian:3,2,1"}


@cache
def continuation(name: str = "llama") -> Tensor:
    """What `generate` writes after the shared prompts, longer than the tests decode."""
    ids, mask = prompts(LENGTHS)
    return tiny(name).generate(
        ids, attention_mask=mask, max_new_tokens=NEW + 8, do_sample=False, pad_token_id=0
    )[:, ids.shape[1] :]


def both(
    drafter: Scripted, tree: Any = "chain:4", rows: list[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor, Speculator]:
    """New tokens of `generate` and of the speculator, and the speculator."""
    ids, mask = prompts(LENGTHS)
    rows = list(range(len(LENGTHS))) if rows is None else rows
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    target: Any = drafter.target
    expected = target.generate(ids[rows], attention_mask=mask[rows], **options)
    speculator = Speculator(target, drafter, tree=tree)
    out = speculator.generate(ids[rows], attention_mask=mask[rows], **options)
    return expected[:, ids.shape[1] :], out[:, ids.shape[1] :], speculator


def rounds_of(decoding: Decoding, ids: Tensor, mask: Tensor, new: int = NEW) -> list[list[int]]:
    """Decode to the end; what each row emitted in each round."""
    with torch.no_grad():
        decoding.prefill(ids, mask, new)
        counts = []
        while not decoding.finished:
            counts.append(decoding.round().count.tolist())
    return counts


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_equal_their_solo_runs(name: str, tree: str) -> None:
    """The same text in the same rounds, alone and beside rows that accept other counts."""
    ids, mask = prompts(LENGTHS)
    script = continuation(name)
    together = decoding_of(tiny(name), make("cached", tiny(name), script), TREES[tree])
    counts = rounds_of(together, ids, mask)
    assert any(len(set(count)) > 2 for count in counts)
    for row, length in enumerate(LENGTHS):
        drafter = make("cached", tiny(name), script[row : row + 1])
        alone = decoding_of(tiny(name), drafter, TREES[tree])
        own = rounds_of(alone, ids[row : row + 1, -length:], mask[row : row + 1, -length:])
        mine = [count[row] for count in counts if count[row]]
        assert [count[0] for count in own] == mine
        assert sum(mine) == NEW - 1
        assert torch.equal(
            alone.sequences[0, length : length + NEW],
            together.sequences[row, ids.shape[1] : ids.shape[1] + NEW],
        )


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6])
def test_an_end_token_inside_an_accepted_block(place: int) -> None:
    """A chain of four that is always right: blocks are places 1-5, 6-10; the end falls in them."""
    script = continuation()[:1].clone()
    eos = int(script[0, place])
    end = script[0].tolist().index(eos)  # it may have come before
    drafter = make("heads", tiny("llama"), script, "always")
    expected, out, speculator = both(drafter, rows=[0], eos_token_id=eos)
    assert out[0].tolist() == expected[0].tolist() == script[0, : end + 1].tolist()
    assert speculator.stats.tokens == end  # the first token is the prefill's
    assert speculator.stats.rounds == -(-end // 5)


def test_several_end_tokens_and_padding() -> None:
    ends = sorted({int(continuation()[0, 6]), int(continuation()[1, 3]), int(continuation()[3, 9])})
    for mode in ("always", "sometimes"):
        drafter = make("cached", tiny("llama"), continuation(), mode)
        expected, out, _ = both(drafter, eos_token_id=ends, pad_token_id=VOCAB - 1)
        assert torch.equal(out, expected)
        assert (out == VOCAB - 1).any()


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 9, 10, 11])
@pytest.mark.parametrize("mode", ["always", "sometimes"])
def test_the_budget_is_kept(mode: str, new: int) -> None:
    """Fewer than, as many as, and one more than a round of a chain of four can give."""
    drafter = make("heads", tiny("llama"), continuation(), mode)
    expected, out, speculator = both(drafter, max_new_tokens=new)
    assert out.shape == (4, new) and torch.equal(out, expected)
    assert speculator.stats.tokens == 4 * (new - 1)
    if mode == "always":
        assert speculator.stats.rounds == 4 * -(-(new - 1) // 5)


def test_finished_rows_stay_silent() -> None:
    """They emit nothing, their drafter is told so, and their text is padding."""
    script = continuation()
    eos = int(script[2, 4])
    ends = [row.tolist().index(eos) if eos in row.tolist()[:NEW] else NEW - 1 for row in script]
    assert len(set(ends)) > 1
    told: list[list[int]] = []

    class Told(Heads):
        def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
            told.append(count.tolist())
            return super().begin(state, features, tokens, count)

    ids, mask = prompts(LENGTHS)
    drafter = Told(tiny("llama"), Script(script))
    decoding = decoding_of(tiny("llama"), drafter, "cartesian:2,1", eos=[eos], pad=VOCAB - 1)
    counts = rounds_of(decoding, ids, mask)
    assert told == [[1] * 4, *counts[:-1]]
    for row, end in enumerate(ends):
        own = [count[row] for count in counts]
        last = max(i for i, count in enumerate(own) if count)
        assert sum(own) == end and 0 not in own[:last]
    assert decoding.stats.rounds == sum(count > 0 for row in counts for count in row)
    assert decoding.stats.tokens == sum(map(sum, counts)) == sum(ends)


@dataclasses.dataclass
class Ranked(Script):
    """A script whose ranks are given place by place."""

    ranks: tuple[int, ...] = ()

    def rank(self, place: Tensor) -> Tensor:
        return torch.tensor(self.ranks)[place]


def test_counting_by_hand() -> None:
    """A chain of two, nine tokens; the first comes from the prefill.

    round 1: place 1 right, 2 wrong -> 1 accepted, emits places 1 2
    round 2: places 3 4 right       -> 2 accepted, emits places 3 4 5
    round 3: place 6 missing        -> 0 accepted, emits place 6
    round 4: places 7 8 right       -> 2 accepted, emits places 7 8, the bonus token is cut
    """
    script = Ranked(continuation()[:1], ranks=(9, 0, 1, 0, 0, 3, 4, 0, 0, *[4] * 30))
    drafter = Heads(tiny("llama"), script)
    _, _, speculator = both(drafter, "chain:2", rows=[0], max_new_tokens=9)
    stats = speculator.stats
    assert (stats.tokens, stats.rounds, stats.tau) == (8, 4, 2.0)
    assert stats.acceptance_by_depth == pytest.approx([3 / 4, 2 / 3])


def test_counting_rows_apart() -> None:
    """An always-right and a never-right row of 5 tokens: 1 round of 4 and 4 rounds of 1."""
    tokens = continuation()[:2].clone()
    tokens[1] = (tokens[1] + 30) % VOCAB  # its candidates are the wrong tokens + 30, 31, …
    drafter = make("heads", tiny("llama"), tokens, "always")
    _, _, speculator = both(drafter, "chain:3", rows=[0, 1], max_new_tokens=5)
    stats = speculator.stats
    assert (stats.tokens, stats.rounds, stats.tau) == (8, 5, 8 / 5)
    assert stats.acceptance_by_depth == pytest.approx([1 / 5, 1, 1])


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3", 2)])
def test_a_static_tree_keeps_its_mask(
    name: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is always of one length: a mask is made once for each kind of layer."""
    made, true = [], masks.tree_mask
    decoding = decoding_of(
        tiny(name), make("cached", tiny(name), continuation(name)[1:2]), "[[0],[1]]"
    )
    monkeypatch.setattr(masks, "tree_mask", lambda *args: made.append(0) or true(*args))
    ids, mask = prompts(LENGTHS)
    assert len(rounds_of(decoding, ids[1:2, -4:], mask[1:2, -4:])) > 3
    assert len(made) == kinds


def test_no_round_has_no_tau() -> None:
    _, _, speculator = both(make("heads", tiny("llama"), continuation()), max_new_tokens=1)
    assert speculator.stats.rounds == 0 and speculator.stats.tau != speculator.stats.tau


class AtSum(StoppingCriteria):
    """Stops a row when its last two tokens add up to more than a bound."""

    def __init__(self, bound: int):
        self.bound = bound

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -2:].sum(1) > self.bound


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("mode", ["always", "sometimes"])
@pytest.mark.parametrize("bound", [80, 95, 108])
def test_custom_criteria_cut_as_generate_cuts(mode: str, tree: str, bound: int) -> None:
    drafter = make("cached", tiny("llama"), continuation(), mode)
    # With an end token `generate` pads rows that have ended; without, it goes on writing in them.
    more = {"stopping_criteria": [AtSum(bound)], "eos_token_id": VOCAB - 1}
    expected, out, _ = both(drafter, TREES[tree], **more)
    assert torch.equal(out, expected)
    free, _, _ = both(drafter, TREES[tree], eos_token_id=VOCAB - 1)
    assert not torch.equal(expected, free[:, : expected.shape[1]])


class PerRow(StoppingCriteria):
    """Made for this batch: each row has its own number of tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        limits = torch.tensor([3, 11, 6, 20]) + max(LENGTHS)
        return input_ids.shape[1] >= limits


def test_criteria_that_know_the_batch() -> None:
    drafter = make("cached", tiny("llama"), continuation())
    more = {"stopping_criteria": [PerRow()], "eos_token_id": VOCAB - 1}
    expected, out, _ = both(drafter, "cartesian:3,2,1", **more)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", ["always", "sometimes", "never"])
@pytest.mark.parametrize("place", [1, 4, 5, 6])
def test_stop_strings_cut_as_generate_cuts(place: int, mode: str) -> None:
    """Two-character strings inside a block of five and across two blocks."""
    tokenizer, script = letters(), continuation()
    strings = ["".join(chr(48 + t) for t in row[place : place + 2].tolist()) for row in script[:2]]
    drafter = make("heads", tiny("llama"), script, mode)
    criteria = [StopStringCriteria(tokenizer, strings)]
    expected, out, _ = both(drafter, "chain:4", stopping_criteria=criteria, eos_token_id=VOCAB - 1)
    assert torch.equal(out, expected)
    first = tokenizer.decode(out[0, :NEW].tolist())
    assert strings[0] in first or strings[1] in first


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_equals_a_fresh_prefill(name: str, tree: str) -> None:
    """After every round: the keys and values of the first `lengths` slots, and the lengths."""
    assert cache_distance(name, TREES[tree]) <= 1e-10


def test_the_oracle_sees_a_skipped_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.Target, "commit", lambda *args: None)
    assert cache_distance("llama", "cartesian:3,2,1") > 1e-3


@torch.no_grad()
def cache_distance(name: str, tree: str) -> float:
    model, worst = tiny(name), 0.0
    ids, mask = prompts(LENGTHS)
    prompt_rows = rows_of(ids, mask)
    decoding = decoding_of(model, make("heads", model, continuation(name)), tree)
    emitted = decoding.prefill(ids, mask, NEW)
    first = emitted.tokens[:, 0].tolist()
    texts = [[*row, token] for row, token in zip(prompt_rows, first, strict=True)]
    while not decoding.finished:
        emitted = decoding.round()
        for row, text in enumerate(texts):
            text += emitted.tokens[row, : emitted.count[row]].tolist()
            length = int(decoding.lengths[row])
            assert length == len(text) - 1  # all but the root
            fresh = DynamicCache()
            model(torch.tensor([text[:-1]]), **{CACHE: fresh})
            layers: list[Any] = fresh.layers  # type: ignore[assignment]
            for index, layer in enumerate(layers):
                for mine, true in zip(
                    decoding.request.target.cache.layer(index),
                    (layer.keys, layer.values),
                    strict=True,
                ):
                    worst = max(worst, float((mine[row, :, :length] - true[0]).abs().max()))
    return worst


@pytest.mark.parametrize("tree", ["chain:4", "cartesian:2,2,1,1"])
def test_the_context_limit_reached_in_mid_draft(tree: str) -> None:
    """Learned positions end at 24: the nodes past them must not be looked up."""
    config = CONFIGS["gpt2"]()
    config.n_positions = config.max_position_embeddings = 24
    model: Any = tf.GPT2LMHeadModel(config).double().eval()
    ids, mask = prompts([13, 5])
    options = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    drafter = make("heads", model, expected[:, 13:])
    out = Speculator(model, drafter, tree=tree).generate(ids, attention_mask=mask, **options)
    assert torch.equal(out, expected)


class Featureless(Heads):
    """Reads no feature at all, like prompt lookup."""

    layers = ()


def test_a_drafter_without_features() -> None:
    drafter = Featureless(tiny("llama"), Script(continuation()))
    expected, out, speculator = both(drafter, "cartesian:3,2,1")
    assert torch.equal(out, expected) and speculator.stats.tau > 1.2


def test_a_speculator_is_used_again() -> None:
    """State of one call does not leak into the next, whatever its batch and length."""
    drafter = make("cached", tiny("llama"), continuation())
    speculator = Speculator(tiny("llama"), drafter, tree="cartesian:2,2")
    ids, mask = prompts(LENGTHS)
    options = {"do_sample": False, "pad_token_id": 0}
    for rows, new in (([0, 1, 2, 3], 12), ([0], 20), ([0, 1], 3), ([0, 1, 2, 3], 12)):
        drafter.script = Script(continuation()[rows])
        out = speculator.generate(
            ids[rows], attention_mask=mask[rows], max_new_tokens=new, **options
        )
        assert torch.equal(out[:, ids.shape[1] :], continuation()[rows, :new])
