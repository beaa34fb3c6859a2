"""Recorded ranks, replayed, are what the loop does; for every shape of drafter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import Step
from headstart.infer import Speculator, StaticTree, parse_static
from headstart.infer.measure.own_text import Written, decode_texts, write_texts
from headstart.infer.measure.ranks import (
    MISSED,
    _rank,
    acceptance,
    best_tree,
    measure_ranks,
    replay,
)
from tests.support import families
from tests.support.scripted import Cached, Script, Scripted, make
from tests.support.tiny import VOCAB, tiny

LENGTHS = (5, 2, 9)
NEW = 30
TREES = ["chain:1", "chain:4", "cartesian:3,2,1", [[0], [1], [2], [1, 0], [1, 0, 2], [0, 1]]]


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def continuation(target: Any) -> Tensor:
    """[B, NEW + room] what the target writes after each prompt."""
    longest = max(LENGTHS)
    return decode_texts(Speculator(target), prompts(), NEW + 12)[:, longest:]


class Forced(Cached):
    """Checks features and tokens as ever, but takes tokens that it did not offer."""

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        kept, self.prompts = self.prompts, None
        step = super().extend(state, tokens, parent)
        self.prompts = kept
        return step


@pytest.mark.parametrize("shape", ["heads", "cached", "lookup"])
@pytest.mark.parametrize("mode", ["always", "never", "sometimes"])
def test_replaying_is_what_the_loop_does(shape: str, mode: str) -> None:
    target = tiny("llama")
    drafter: Scripted = make(shape, target, continuation(target), mode)
    if shape == "cached":
        rows = [row.tolist() for row in prompts()]
        drafter = Forced(target, Script(continuation(target), mode), prompts=rows)
    texts = write_texts(target, drafter, prompts(), NEW)
    assert [text.prompt for text in texts] == list(LENGTHS)
    assert [len(text.tokens) for text in texts] == [length + NEW for length in LENGTHS]
    ranks = measure_ranks(drafter, texts, depth=4)
    assert [tuple(each.shape) for each in ranks] == [(NEW - 1, 4)] * 3
    for tree in map(parse_static, TREES):
        speculator = Speculator(target, drafter, tree=tree)
        decode_texts(speculator, prompts(), NEW)
        expected = replay(ranks, tree.paths)
        assert sum(expected.tokens) == speculator.stats.tokens
        assert sum(expected.rounds) == speculator.stats.rounds
    if isinstance(drafter, Cached):
        assert drafter.checks > NEW


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "draft_model", "lookup", "retrieval"])
def test_so_it_is_with_the_noise_of_sampled_text(name: str) -> None:
    drafter = families.drafter(name, "tiny")
    model = drafter.target
    model.generation_config.top_k = 12  # which proposals follow, too
    given = model, drafter, prompts(), NEW
    try:
        texts = write_texts(*given, temperature=0.8)
        assert [text.seed for text in texts] == [0, 1, 2]
        ranks = measure_ranks(drafter, texts, depth=4, temperature=0.8)
        unlike = measure_ranks(drafter, texts, depth=4)  # without the noise
        assert name == "lookup" or acceptance(ranks, 3).sum() > acceptance(unlike, 3).sum()
        for tree in map(parse_static, TREES):
            if drafter.max_depth is not None and tree.max_depth > drafter.max_depth:
                continue
            speculator = Speculator(model, drafter, tree=tree)
            ids = decode_texts(speculator, prompts(), NEW, 0.8)
            assert all(text.tokens[-1] == row[-1] for text, row in zip(texts, ids, strict=True))
            expected = replay(ranks, tree.paths)
            assert sum(expected.tokens) == speculator.stats.tokens
            assert sum(expected.rounds) == speculator.stats.rounds
    finally:
        model.generation_config.top_k = None


def test_a_drafter_that_observes_is_shown_each_answer() -> None:
    """Against a table of the best tokens of all that was read before, kept by hand."""
    drafter = families.drafter("recycling", "tiny")
    target, size = drafter.target, drafter.config.successors
    texts, depth, hits = write_texts(target, drafter, prompts(), NEW), 3, 0
    ranks = measure_ranks(drafter, texts, depth)
    for text, found in zip(texts, ranks, strict=True):
        ids = text.tokens.tolist()
        best = target(text.tokens.unsqueeze(0)).logits[0].topk(size).indices.tolist()
        table = dict(zip(ids[: text.prompt], best, strict=False))
        for place, at in enumerate(range(text.prompt, len(ids) - 1)):
            for level in range(depth):
                rank = MISSED
                if at + level + 1 < len(ids) and ids[at + level + 1] in (
                    row := table.get(ids[at + level], [])
                ):
                    rank, hits = row.index(ids[at + level + 1]), hits + 1
                assert found[place, level] == rank
            table[ids[at]] = best[at]
    assert hits > 20


def test_a_wrong_rank_shows() -> None:
    """The negative control: ranks that are one off replay to something else."""
    target = tiny("llama")
    drafter = make("heads", target, continuation(target))
    ranks = measure_ranks(drafter, write_texts(target, drafter, prompts(), NEW))
    shifted = [each + 1 for each in ranks]
    chain = StaticTree.chain(4).paths
    assert replay(ranks, chain).tau > 1.3 > 1.2 > replay(shifted, chain).tau


def test_texts_end_with_their_end_token() -> None:
    target = tiny("llama")
    text = continuation(target)
    end = int(text[1, 7])
    target.generation_config.eos_token_id = end
    try:
        drafter = make("heads", target, text)
        written = write_texts(target, drafter, prompts(), NEW)
        ranks = measure_ranks(drafter, written)
        ends = [row[:NEW].tolist().index(end) + 1 if end in row[:NEW] else NEW for row in text]
        assert [len(each.tokens) - each.prompt for each in written] == ends
        assert list(map(len, ranks)) == [count - 1 for count in ends]
        assert ends[1] <= 8
        tree = StaticTree.cartesian([2, 2])
        speculator = Speculator(target, drafter, tree=tree)
        decode_texts(speculator, prompts(), NEW)
        expected = replay(ranks, tree.paths)
        assert expected.tau == pytest.approx(speculator.stats.tau)
    finally:
        target.generation_config.eos_token_id = None


def test_what_was_never_written_has_no_rank() -> None:
    target = tiny("llama")
    drafter = make("heads", target, continuation(target), "always")
    (ranks, *_) = measure_ranks(drafter, write_texts(target, drafter, prompts(), 5))
    last = [[0, 0, 0, 0], [0, 0, 0, MISSED], [0, 0, MISSED, MISSED], [0, MISSED, MISSED, MISSED]]
    assert ranks.tolist() == last


def test_ranks_of_lists_and_of_narrow_vocabularies() -> None:
    wanted = torch.tensor([7, 9, 3])
    ids = torch.tensor([[[7, 1]], [[1, 9]], [[1, -1]]])
    assert _rank(Step(ids=ids), None, wanted).tolist() == [0, 1, MISSED]
    backwards = torch.arange(ids.shape[-1]).expand(ids.shape)  # such as after the noise of a text
    last = ids.shape[-1] - 1
    assert _rank(Step(ids=ids), backwards, wanted).tolist() == [last, last - 1, MISSED]
    logits = torch.tensor([[[3.0, 1.0, 2.0]]]).expand(3, -1, -1)
    vocabulary = torch.tensor([3, 7, 8])
    assert _rank(Step(logits, vocabulary), None, wanted).tolist() == [2, MISSED, 0]
    equal = torch.zeros(3, 1, 12)
    assert _rank(Step(equal), None, wanted).tolist() == [7, 9, 3]
    broken = torch.full((1, 1, 4), torch.nan)
    assert _rank(Step(broken), None, torch.tensor([2])).tolist() == [4]


def test_the_drafter_keeps_its_mode() -> None:
    target = tiny("llama")
    drafter = make("heads", target, continuation(target)).train()
    measure_ranks(drafter, write_texts(target, drafter, prompts(), 4))
    assert drafter.training


def test_a_text_of_one_token_has_no_round() -> None:
    drafter = make("heads", tiny("llama"), torch.zeros(1, 4, dtype=torch.long))
    text = Written(torch.tensor([1, 2, 3]), torch.zeros(3, 32), prompt=2)
    (ranks,) = measure_ranks(drafter, [text])
    assert ranks.shape == (0, 4)
    assert replay([ranks], [[0]]).tau == 1.0


def test_acceptance_leaves_the_end_of_a_text_out() -> None:
    by_depth = acceptance([torch.tensor([[0, 0], [1, MISSED]])] * 2, width=2)
    assert by_depth.tolist() == [[0.5, 0.5], [1.0, 0.0]]


def test_the_best_tree_replays_best() -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = [torch.randint(3, (60, 3), generator=generator)]
    best = best_tree(ranks, 6)
    chain = StaticTree.chain(3).paths
    assert replay(ranks, best).tau > replay(ranks, chain).tau
