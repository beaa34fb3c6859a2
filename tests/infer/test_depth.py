"""The depth of adaptive trees: which one is chosen, and that the text does not depend on it."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from headstart.heads.families import KNOWN
from headstart.infer import Batcher, Speculator, parse_tree
from headstart.infer.depth import PLAIN_ROUNDS, DepthChoice, RoundTimes
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.ranks import measure_ranks
from tests.support.families import LENGTHS, TREES, UNIONS, drafter, own, target
from tests.support.scripted import make
from tests.support.tape import NEW, SAMPLED, decode, on_tape
from tests.support.tiny import prompts, tiny

LEVELS: Any = parse_tree("adaptive:chain:7")
SECONDS = {0: 1.0, 1: 1.3, 3: 1.6, 7: 2.4}
"""Of a round, by its depth."""


def followed(share: float, rounds: int, choice: DepthChoice, seed: int = 0) -> list[int]:
    """The depths of the rounds of a text, in which every node is accepted with that probability."""
    rng, found, going = random.Random(seed), [], np.array([True])
    for _ in range(rounds):
        tree = choice.next()
        found.append(tree.max_depth)
        nodes = 1
        while nodes <= tree.max_depth and rng.random() < share:
            nodes += 1
        choice.note(tree, np.array([nodes]), going, SECONDS[tree.max_depth])
    return found


def chooser(plain: bool = True) -> DepthChoice:
    return DepthChoice(RoundTimes(LEVELS.levels), plain)


def test_small_depths_are_timed_first() -> None:
    assert followed(0.9, 9, chooser()) == [3] * 3 + [1] * 3 + [0] * 3
    assert followed(0.9, 6, chooser(plain=False)) == [3] * 3 + [1] * 3


def test_what_deep_rounds_take_is_not_tried_where_little_is_accepted() -> None:
    choice = chooser()
    assert 7 not in followed(0.1, 200, choice)
    assert choice.times.seconds == pytest.approx([1.0, 1.3, 1.6, 2.2])  # the last expected
    followed(1.0, 60, choice)
    assert choice.times.seconds == pytest.approx([1.0, 1.3, 1.6, 2.4])


@pytest.mark.parametrize(("share", "best"), [(0.97, 7), (0.6, 3), (0.1, 0)])
def test_the_depth_that_emits_most_is_taken(share: float, best: int) -> None:
    def rate(depths: list[int]) -> float:
        """Tokens a second that such rounds are expected to write."""
        tokens = sum(sum(share**k for k in range(depth + 1)) for depth in depths)
        return tokens / sum(SECONDS[depth] for depth in depths)

    assert max(SECONDS, key=lambda depth: rate([depth])) == best
    found = followed(share, 400, chooser())[50:]
    assert rate(found) > 0.93 * rate([best])


def test_a_change_of_the_text_is_followed() -> None:
    choice = chooser()
    assert followed(0.0, 100, choice)[60:].count(0) > 30
    assert followed(1.0, 100, choice)[-20:] == [7] * 20
    assert followed(0.0, 100, choice)[-20:].count(0) > 16


def test_plain_rounds_are_followed_by_one_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(found: list[int]) -> int:
        return max(map(len, "".join("d" if depth else "p" for depth in found).split("d")))

    assert longest(followed(0.0, 200, choice := chooser())) == 11  # of 1.0, to one of 1.3: 3 %
    monkeypatch.setitem(SECONDS, 1, 5.0)
    assert longest(followed(0.0, 200, chooser())) == PLAIN_ROUNDS
    assert 0 not in followed(0.0, 100, chooser(plain=False))
    assert (
        choice.times.shares.values[0] < 0.3
    )  # the next text begins with what is known of this one


def test_old_times_are_measured_anew() -> None:
    choice = chooser()
    found = followed(1.0, 1000, choice)
    assert found[20:].count(7) > 0.97 * 980
    assert set(found[100:]) == {0, 1, 3, 7}  # each is timed now and then


def test_rows_are_weighed_together() -> None:
    for rows, best in (([8, 1], 7), ([8, *[1] * 9], 0), ([2, 4, 4, 1], 3)):
        choice, nodes = chooser(), np.array(rows)
        for level in LEVELS.levels[::-1] * 20:
            own = nodes.clip(max=level.max_depth + 1)
            choice.note(level, own, nodes > 0, SECONDS[level.max_depth])
            choice.note(level, own, nodes < 0, SECONDS[level.max_depth])  # no row is left
        assert choice.next().max_depth == best


@pytest.fixture
def at_random(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Depths are drawn at random; returns those of all rounds since."""
    rng, found = random.Random(7), list[int]()

    def draw(self: DepthChoice) -> Any:
        level = self.times.levels[rng.choice(range(self._first, len(self.times.levels)))]
        found.append(level.max_depth)
        return level

    monkeypatch.setattr(DepthChoice, "next", draw)
    return found


def named(name: str, tree: str) -> str:
    return f"adaptive:{UNIONS[name]}+{tree}" if name in UNIONS else f"adaptive:{tree}"


def cases() -> list[Any]:
    """Each family with one kind of tree; by default greedily or sampled, in turns."""
    return [
        pytest.param(
            *(name, named(name, TREES[number % len(TREES)]), sampled),
            marks=() if sampled == number // 2 % 2 else pytest.mark.proof,
        )
        for number, name in enumerate((*KNOWN, *UNIONS))
        for sampled in (False, True)
    ]


@pytest.mark.parametrize(("name", "tree", "sampled"), cases())
def test_text_does_not_depend_on_depths(
    name: str, tree: str, sampled: bool, at_random: list[int]
) -> None:
    model, made = target(own(name)), drafter(name, own(name))
    options = SAMPLED | {"seed": [3, 1, 4, 5]} if sampled else {"do_sample": False}
    ids, mask = prompts(LENGTHS)
    given = {"attention_mask": mask, "max_new_tokens": NEW, **options}
    plain = Speculator(model, tree="plain").generate(ids, **given)
    for _ in range(2):
        found = Speculator(model, made, tree=tree).generate(ids, **given)
        assert torch.equal(found, plain)
    assert len({*at_random}) > 2


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "suffix"])
def test_drafters_keep_up_with_plain_rounds(name: str, at_random: list[int]) -> None:
    """What each round accepts is what the drafter accepts there when it has seen every round."""
    model, made = target(own(name)), drafter(name, own(name))
    if made.observes:
        pytest.skip("it learns from the nodes of each round's tree, and so from their number")
    rows = [row[row > 0] for row in prompts(LENGTHS)[0]]
    texts = write_texts(model, made, rows, NEW)
    accepted = [(ranks == 0).cumprod(1).sum(1) for ranks in measure_ranks(made, texts, 3)]
    speculator = Speculator(model, made, tree="adaptive:chain:3")
    speculator.generate(*[], **padded(rows), max_new_tokens=NEW, do_sample=False)
    for row, own_accepted in enumerate(accepted):
        place = 0
        for depth, (count, nodes) in zip(at_random, speculator.stats.rounds_of(row), strict=False):
            left = len(own_accepted) - place
            assert min(nodes - 1, left) == min(int(own_accepted[place]), depth), (row, place)
            place += count
    assert 0 in at_random and 3 in at_random


def padded(rows: list[Any]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side="left")
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["medusa", "eagle", "draft_model", "lookup"])
def test_captured_rounds(name: str, at_random: list[int]) -> None:
    speculator = Speculator(target("tiny"), drafter(name, "tiny"), tree="adaptive:chain:3")
    on_tape(speculator)
    expected = decode(Speculator(target("tiny"), tree="plain"), 4)
    for _ in range(3):
        assert torch.equal(decode(speculator, 4), expected)
    assert {*at_random} == {1, 3}
    assert speculator.graphs is not None and speculator.graphs.replayed > 10


def test_a_batch_whose_rows_are_filled_anew(at_random: list[int]) -> None:
    alone, options = Speculator(target("tiny"), tree="plain"), {"do_sample": False}
    adaptive = Speculator(target("tiny"), drafter("eagle", "tiny"), tree="adaptive:chain:3")
    rows = [row[row > 0].unsqueeze(0) for row in prompts(LENGTHS)[0]]
    new = range(NEW, NEW - len(rows), -1)
    batcher = Batcher(adaptive, 2)
    with ThreadPoolExecutor(4) as pool:
        decode = [
            pool.submit(batcher.generate, row, max_new_tokens=count, **options)
            for row, count in zip(rows, new, strict=True)
        ]
    for row, count, text in zip(rows, new, decode, strict=True):
        assert torch.equal(text.result(), alone.generate(row, max_new_tokens=count, **options))
    assert 0 in at_random and 3 in at_random


@pytest.mark.usefixtures("at_random")
@pytest.mark.parametrize("shape", ["heads", "cached", "lookup"])
def test_shares_by_depth_are_of_rounds_that_went_so_deep(shape: str) -> None:
    """Rounds cut short count for no rejection of what they did not draft."""
    ids, mask = prompts(LENGTHS)
    given = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    plain = Speculator(tiny("llama"), tree="plain").generate(ids, **given)
    longer = Speculator(tiny("llama"), tree="plain").generate(ids, **given | {"max_new_tokens": 32})
    rows = [row[row > 0].tolist() for row in ids]
    always = make(shape, tiny("llama"), longer[:, ids.shape[1] :], "always", prompts=rows)
    speculator = Speculator(tiny("llama"), always, tree="adaptive:chain:4")
    assert torch.equal(speculator.generate(ids, **given), plain)
    assert speculator.stats.acceptance_by_depth == [1.0] * 4
    assert 1.0 < speculator.stats.tau < 5.0


def test_times_stay_with_the_speculator() -> None:
    ids = torch.tensor([[5, 9, 7]])
    speculator = Speculator(target("tiny"), drafter("medusa", "tiny"), tree="adaptive:chain:2")
    speculator.generate(ids, max_new_tokens=40, do_sample=False)
    times = speculator.times_of(1, 0.0)
    assert times is not None and np.isfinite(times.seconds).all()
    assert times is speculator.times_of(1, 0.0) is not speculator.times_of(2, 0.0)
    assert speculator.times_of(1, 0.7) is not times
