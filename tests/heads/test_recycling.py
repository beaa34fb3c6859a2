"""Token recycling: its table against loops over nodes, and in the decode loop."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import headstart
from headstart.heads import OptionError, family, recycling
from headstart.heads.core import FINAL, capture
from headstart.heads.recycling import Recycling, RecyclingConfig, RecyclingState
from headstart.infer import Speculator, parse_static
from tests.support.best import found_by_kernels
from tests.support.scripted import decoding_of
from tests.support.tiny import VOCAB, one_line, prompts, tiny
from tests.support.weightless import SPARSE, check_no_wait, check_shared_noise, generated


def drafter(**options: Any) -> Recycling:
    return Recycling(RecyclingConfig.for_target(tiny("llama"), **options)).bind(tiny("llama"))


def known(table: Tensor) -> dict[int, list[int]]:
    """The rows of a table [V, k] that were written."""
    return {token: row for token, row in enumerate(table.tolist()) if row[0] >= 0}


def fresh(rows: int, size: int, successors: int) -> RecyclingState:
    state = RecyclingState()
    state.table = torch.full((rows, size, successors), -1, dtype=torch.int32)
    return state


def logits_of(best: list[list[int]], size: int) -> Tensor:
    """Logits [1, N, V] by which each node's best tokens are these, in this order."""
    logits = torch.zeros(1, len(best), size)
    for node, row in enumerate(best):
        for rank, token in enumerate(row):
            logits[0, node, token] = 9.0 - rank
    return logits


def test_the_example_of_the_module() -> None:
    a, b, c, d = range(4)
    made = Recycling(RecyclingConfig(hidden_size=8, vocab_size=4, successors=2))
    state = fresh(1, 4, 2)
    tokens, logits = torch.tensor([[a, b, b, c]]), logits_of([[b, c], [c, d], [c, a], [a, b]], 4)
    made.observe(state, tokens, logits, torch.ones_like(tokens) > 0)
    assert known(state.table[0]) == {a: [b, c], b: [c, a], c: [a, b]}
    step = made.begin(state, torch.empty(1, 1, 8), torch.tensor([[c]]), torch.tensor([1]))
    assert step.ids is not None and step.ids.tolist() == [[[a, b]]]
    step = made.extend(state, torch.tensor([[a, b]]), torch.tensor([[-1, -1]]))
    assert step.ids is not None and step.ids.tolist() == [[[b, c], [c, a]]]
    nothing = made.extend(state, torch.tensor([[d]]), torch.tensor([[1]]))
    assert nothing.ids is not None and nothing.ids.tolist() == [[[-1, -1]]]


def test_successors_are_found_by_the_kernel_for_the_best_tokens() -> None:
    made = Recycling(RecyclingConfig(hidden_size=8, vocab_size=40))
    tokens, logits = torch.arange(5).view(1, 5), torch.randn(1, 5, 40)
    states = [fresh(1, 40, 8) for _ in range(2)]
    made.observe(states[0], tokens, logits, torch.ones_like(tokens) > 0)
    with found_by_kernels() as asked:
        made.observe(states[1], tokens, logits, torch.ones_like(tokens) > 0)
    assert asked == [8] and torch.equal(states[0].table, states[1].table)


@pytest.mark.parametrize("successors", [1, 3])
def test_equals_loops_over_nodes(successors: int) -> None:
    """Few tokens, so that many nodes share one; some are not there, and row 2 has ended."""
    size, rng = 12, random.Random(3)
    made = Recycling(RecyclingConfig(hidden_size=8, vocab_size=size, successors=successors))
    state, alone = fresh(4, size, successors), [fresh(1, size, successors) for _ in range(4)]
    expected: list[dict[int, list[int]]] = [{} for _ in range(4)]
    generator, twice = torch.Generator().manual_seed(5), 0
    for _ in range(30):
        tokens = torch.tensor([[rng.randrange(5) for _ in range(7)] for _ in range(4)])
        true = torch.tensor([[rng.random() < 0.7 for _ in range(7)] for _ in range(4)])
        true[2] = False
        logits = torch.randn(4, 7, size, generator=generator)
        for row, node in true.nonzero().tolist():
            best = logits[row, node].sort(descending=True).indices[:successors].tolist()
            twice += int(tokens[row, node]) in tokens[row, :node][true[row, :node]].tolist()
            expected[row][int(tokens[row, node])] = best
        made.observe(state, tokens, logits, true)
        for row, own in enumerate(alone):
            at = slice(row, row + 1)
            made.observe(own, tokens[at], logits[at], true[at])
    assert [known(row) for row in state.table] == expected
    assert [known(own.table[0]) for own in alone] == expected
    assert twice > 30 and not expected[2] and len(expected[0]) == 5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("at_once", [1 << 25, 3 * VOCAB, 1])
def test_the_prompt_is_seen_first(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths; the last occurrence of a token counts, and no padding does."""
    monkeypatch.setattr(recycling, "_LOGITS", at_once)
    model, rng = tiny(name), random.Random(4)
    made = Recycling(RecyclingConfig.for_target(model, successors=3)).bind(model)
    texts = [[rng.randrange(9) for _ in range(length)] for length in (21, 1, 8)]
    count = torch.tensor(list(map(len, texts)))
    tokens = torch.tensor([text + [60] * (21 - len(text)) for text in texts])
    state = made.start(3, 64)
    with torch.no_grad():
        made.prefill(state, capture(model, [FINAL], tokens), tokens, count)
        for row, text in enumerate(texts):
            logits = model(torch.tensor([text])).logits[0]
            best = logits.topk(3).indices.tolist()
            assert known(state.table[row]) == dict(zip(text, best, strict=True))
    assert len(known(state.table[0])) < 10


def test_a_round_shows_all_that_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also nodes that were rejected, by what the target says after the path to each."""
    shown: list[tuple[Tensor, ...]] = []
    observe = Recycling.observe

    def noted(self: Recycling, state: Any, *given: Tensor) -> None:
        shown.append(tuple(each.clone() for each in given))
        observe(self, state, *given)

    monkeypatch.setattr(Recycling, "observe", noted)
    model, (ids, mask) = tiny("llama"), prompts([11])
    decoding = decoding_of(model, drafter(), SPARSE)
    paths = [(), *(tuple(path) for path in SPARSE)]
    above = [0, *(paths.index(path[:-1]) for path in paths[1:])]
    with torch.no_grad():
        text = ids[0].tolist()
        decoding.prefill(ids, mask, 30)
        tokens, logits, _ = shown.pop()
        assert tokens.tolist() == [text[-1:]]
        torch.testing.assert_close(logits[0, 0], model(ids).logits[0, -1])
        rejected = 0
        text.append(int(decoding.request.committed.root))
        for _ in range(6):
            emitted = decoding.round()
            tokens, logits, true = shown.pop()
            assert not shown and true[0, 0]
            for node in true[0].nonzero().flatten().tolist():
                path, at = [int(tokens[0, node])], node
                while at:
                    at = above[at]
                    path.insert(0, int(tokens[0, at]))
                assert path[0] == text[-1]
                found = model(torch.tensor([text[:-1] + path])).logits[0, -1]
                torch.testing.assert_close(logits[0, node], found)
            rejected += int(true.sum() - emitted.count[0])
            text += emitted.tokens[0, : emitted.count[0]].tolist()
    assert rejected > 10


def test_a_row_that_has_ended_learns_nothing() -> None:
    model, (ids, mask) = tiny("llama"), prompts([9, 7])
    text = Speculator(model).generate(
        ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    end = next(t for t in text[0, 9:].tolist() if t not in text[1, 9:])  # of the first row alone
    decoding = decoding_of(model, drafter(), SPARSE, eos=[end])
    with torch.no_grad():
        decoding.prefill(ids, mask, 30)
        while not decoding.request.rows.ended:
            decoding.round()
        decoding.round()  # hands over what the row ended with
        before = decoding.request.states[0].table.clone()
        for _ in range(3):
            decoding.round()
        after = decoding.request.states[0].table
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])


@pytest.mark.parametrize("successors", [1, 2, 4, 9])
def test_its_own_tree_asks_for_no_more_than_there_is(successors: int) -> None:
    tree = parse_static(drafter(successors=successors).default_tree)
    assert max(tree.ranks) == min(successors, 6) - 1
    assert generated(drafter(successors=successors), None, 1, False)[2].tree.nodes == tree.nodes


TREES = ["chain:4", "cartesian:3,2,1", SPARSE, "best-first:9,3,4", "beam:3,4", None]


@pytest.mark.parametrize("stop", [False, True], ids=["length", "eos"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_generate(tree: Any, batch: int, stop: bool) -> None:
    expected, out, speculator = generated(drafter(), tree, batch, stop)
    assert torch.equal(out, expected)
    assert stop or speculator.stats.tau > 1


@pytest.mark.parametrize("names", [["recycling", "lookup"], ["lookup", "recycling"]])
@pytest.mark.parametrize("tree", [None, "cartesian:3,2+chain:4", "best-first:9,3,4+beam:2,3"])
def test_together_with_lookup(names: list[str], tree: str | None) -> None:
    """The union accepts what either would have proposed, and both are shown their own."""
    model = tiny("llama")
    made = [family(name).of_target(model).bind(model) for name in names]
    for batch, stop in ((1, True), (4, True), (4, False)):
        expected, out, speculator = generated(made, tree, batch, stop)
        assert torch.equal(out, expected)
    assert speculator.drafters.observes
    wrote = set(speculator.stats.drafted.drafters.flatten().tolist())
    assert wrote >= {0, 1}


@pytest.mark.parametrize("tree", ["chain:3", "cartesian:3,2"])
def test_sampling_with_shared_noise_is_plain_sampling(tree: str) -> None:
    check_shared_noise(drafter(), tree)


@pytest.mark.parametrize("successors", [0, -1, VOCAB + 1])
def test_bad_options_are_one_line(successors: int) -> None:
    with pytest.raises(OptionError) as caught:
        RecyclingConfig.for_target(tiny("llama"), successors=successors)
    assert f"drafter.successors is {successors}" in one_line(caught.value)


def test_it_is_loaded_by_name() -> None:
    speculator = headstart.load(tiny("llama"), "recycling")
    assert isinstance(speculator.drafter, Recycling)
    assert speculator.tree.nodes == 16 and speculator.tree.max_depth == 4
    out = speculator.generate(prompts([9])[0], max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 14)


@pytest.mark.parametrize("tree", ["chain:4", "cartesian:3,2,1"])
def test_a_round_does_not_wait(tree: str) -> None:
    check_no_wait(drafter(), tree)
