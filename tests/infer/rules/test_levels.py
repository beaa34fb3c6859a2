"""Traversal a level at a time: the same answers, the target's distribution, and few launches."""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.launches import Counts
from benchmarks.rule_launches import verified_at
from headstart.heads import Topology
from headstart.infer.rules import levels, siblings, traversal
from headstart.infer.rules.levels import judge_all
from headstart.infer.rules.rule_api import Verified
from headstart.infer.rules.traversal import node_weights
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.rounds import EXACT, SMALL, round_of
from tests.support.walker import (
    KINDS,
    NAN,
    WARPERS,
    agrees_with_the_walker,
    answers,
    judges_rows_as_if_alone,
    never_accepts_a_drafter_of_nan,
    random_tree,
    verified_of,
)


@pytest.fixture
def by_level() -> Iterator[list[int]]:
    """All trees are judged by level; how many were."""
    seen: list[int] = []

    def noted(verified: Verified) -> Any:
        seen.append(verified.tree.nodes)
        return judge_all(verified)

    with (
        mock.patch.object(traversal, "at_once", lambda verified: True),
        mock.patch.object(traversal, "judge_all", noted),
    ):
        yield seen
    assert seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [None, WARPERS])
def test_it_answers_as_the_recursion(by_level: list[int], kind: str, processors: Any) -> None:
    agrees_with_the_walker(traversal.traversal, kind, processors)


def test_rows_and_drafters_of_nan(by_level: list[int]) -> None:
    judges_rows_as_if_alone(traversal.traversal, "mixed")
    never_accepts_a_drafter_of_nan(traversal.traversal)


def test_scores_that_are_no_distribution(by_level: list[int]) -> None:
    generator = torch.Generator().manual_seed(7)
    verified = verified_of(random_tree("without", 60, 9, generator), generator)
    verified.logits[30:] = NAN
    verified.logits[:30, 1] = NAN
    found = answers(traversal.traversal(verified))
    with mock.patch.object(traversal, "at_once", lambda verified: False):
        assert found == answers(traversal.traversal(verified))
    assert found[30:] == [([0], [-1])] * 30 and any(1 in path for path, _ in found[:30])


PAIRS = ["topk", "with_replacement", "without_replacement"]


@torch.no_grad()
@pytest.mark.parametrize("expansion", PAIRS)
@pytest.mark.parametrize("shape", ["chain", "wide", "cartesian of heads", "uneven", "narrow"])
def test_the_law_is_the_targets(by_level: list[int], expansion: str, shape: str) -> None:
    for warp in ("plain", "all"):
        assert round_of((expansion, "traversal"), SMALL[shape], warp).distance() <= EXACT


@torch.no_grad()
@pytest.mark.parametrize("shape", ["union", "union of vocabularies", "union with candidates"])
def test_the_law_with_several_drafters(by_level: list[int], shape: str) -> None:
    assert round_of(("without_replacement", "traversal"), SMALL[shape]).distance() <= EXACT


@torch.no_grad()
@pytest.mark.parametrize("shape", ["best first", "beam", "candidates"])
def test_the_law_of_shapes_that_the_host_does_not_know(by_level: list[int], shape: str) -> None:
    assert round_of(("topk", "traversal"), SMALL[shape]).distance() <= EXACT


@torch.no_grad()
def test_a_wrong_weight_would_show(by_level: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: children that are accepted without their node's weight."""
    true = siblings.accept_probability
    trial = round_of(("without_replacement", "traversal"), SMALL["cartesian"])
    monkeypatch.setattr(siblings, "accept_probability", lambda p_x, q_x, weight: true(p_x, q_x))
    assert trial.distance() > 1e-3


def launches(tree: str) -> int:
    verified, counted = verified_at(tree, 40, WARPERS), Counts()
    with counted:
        traversal.traversal(verified)
    return counted.launches


@torch.no_grad()
def test_launches_grow_with_depth_alone() -> None:
    trees = {"cartesian:3,1": 7, "cartesian:3,20": 64, "cartesian:9,6": 64, "cartesian:3,2,2": 22}
    own = [launches(tree) for tree in trees]
    with mock.patch.object(traversal, "at_once", lambda verified: True):
        found = [launches(tree) for tree in trees]
    assert found[0] == found[1] == found[2] < found[3] < found[0] + 12
    assert own[1] > 5 * own[0] > 5 * found[0]


def differences(device: str = "cpu") -> dict[str, float]:
    """The largest difference of the kernel from its definition, by the kind of tree."""
    from headstart.infer.rules import level_kernels

    def launched(*given: Any) -> None:
        there: list[Any] = [each.to(device) if isinstance(each, Tensor) else each for each in given]
        level_kernels.judge_level(*there[:-1])
        for own, other in zip(given, there, strict=True):
            if isinstance(own, Tensor):
                own.copy_(other)

    worst = {}
    for number, kind in enumerate((*KINDS, "turns", "nan")):
        generator = torch.Generator().manual_seed(number)
        tree = random_tree(kind if kind in KINDS else "mixed", 3, 9, generator)
        if kind == "turns":
            shape = tree.topology
            parents = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 6, 6]]).expand(3, -1)
            children = ((1, 2, 3), (4, 5), (6,), (), (), (), (7, 8), (), ())
            shape = Topology.from_parents(parents, 3, 3, children)
            tree.topology, tree.turns = shape, (0, 2)
        verified = verified_of(tree, generator, WARPERS)
        if kind == "nan":
            verified.logits[0, 0], verified.logits[1, 1] = NAN, NAN
        before, after = node_weights(verified)
        plain = judge_all(verified)
        with mock.patch.object(levels, "judge_level", launched):
            found = judge_all(verified)
        side = found[3].unsqueeze(-1) > 0
        left = torch.where(side, found[2][1], found[2][0])
        left = left / left.sum(-1, keepdim=True)
        pairs = [
            (found[0], before), (found[1], after), (plain[0], before), (plain[1], after),
            (left, plain[2][0]),
        ]  # fmt: skip
        worst[kind] = max(float((a.nan_to_num(7) - b.nan_to_num(7)).abs().max()) for a, b in pairs)
        assert bool(found[3].any()) or kind == "nan"
    return worst


@without_triton
def test_the_kernel_in_the_interpreter() -> None:
    check(run_interpreted(__name__))


@pytest.mark.gpu
@without_triton
def test_the_kernel_compiled() -> None:
    check(differences("cuda"))


def check(found: dict[str, float]) -> None:
    assert len(found) == len(KINDS) + 2 and all(each <= 1e-12 for each in found.values()), found


if __name__ == "__main__":
    from headstart.infer.rules import level_kernels

    level_kernels._BLOCK = 4  # two steps for a vocabulary of seven
    print(json.dumps(differences()))
