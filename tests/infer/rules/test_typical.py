"""The rule `typical`: by hand, against a plain walker, and that it is not exact."""

import math

import pytest
import torch
from torch import Tensor

from headstart.heads import Sampling, TokenTree, Topology
from headstart.infer.rules.registry import RULES
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.rules.typical import typical
from tests.support.tiny import path_to
from tests.support.walker import (
    NAN,
    WARPERS,
    Answer,
    Walker,
    answers,
    random_tree,
    row_of,
    verified_of,
)


def walked(walker: Walker, epsilon: float = 0.09, delta: float = 0.3) -> Answer:
    """All paths of typical tokens; the longest, and of those the likeliest."""
    best, best_key = 0, (0, 0.0)
    for node in range(1, len(walker.parents)):
        total, good = 0.0, True
        for step in path_to(walker.parents, node)[1:]:
            p = walker.p(walker.parents[step])
            entropy = -sum(value * math.log(value) for value in p if value > 0)
            chance = p[walker.tokens[step]]
            good = good and walker.valid[step]
            good = good and chance > min(epsilon, delta * math.exp(-entropy))
            total += math.log(chance) if chance > 0 else -math.inf
        key = (len(path_to(walker.parents, node)) - 1, total)
        if good and (best == 0 or key > best_key):
            best, best_key = node, key
    path, p = path_to(walker.parents, best), walker.p(best)
    return path, [*(walker.tokens[step] for step in path[1:]), p.index(max(p))]


def one_level(p: list[float], tokens: list[int]) -> Answer:
    """What is accepted of the root's children, of which none is below another."""
    parents = torch.tensor([[-1, *[0] * len(tokens)]])
    shape = Topology.from_parents(parents, 1)
    tree = TokenTree(torch.tensor([[0, *tokens]]), shape, None, torch.full_like(parents, -1))
    logits = torch.tensor(p, dtype=torch.float64).log().expand(1, tree.nodes, -1)
    sampling = Sampling(torch.tensor([1]), None, torch.float64)
    text = Text(torch.zeros(1, 8, dtype=torch.long), 1)
    return answers(typical(Verified(tree, logits, sampling, torch.tensor([0]), text)))[0]


def test_the_threshold_by_hand() -> None:
    """(0.9, 0.08, 0.02): H = 0.375, 0.3 · exp(−H) = 0.206, so 0.09 decides, and 0.08 is too little.

    Eight even tokens: exp(−H) = 0.125, so 0.0375 decides, and all are.
    """
    assert one_level([0.9, 0.08, 0.02], [1, 2]) == ([0], [0])
    assert one_level([0.9, 0.08, 0.02], [1, 0]) == ([0, 2], [0, 0])
    assert one_level([0.125] * 8, [5]) == ([0, 1], [5, 0])
    peaked = [0.3, 0.1, *[0.006] * 100]  # 0.3 · exp(−H) = 0.0095
    assert one_level(peaked, [50]) == ([0], [0]) and one_level(peaked, [1]) == ([0, 1], [1, 0])


def test_of_equal_lengths_the_likeliest_is_accepted() -> None:
    assert one_level([0.5, 0.2, 0.3], [1, 2]) == ([0, 2], [2, 0])


@pytest.mark.parametrize("processors", [None, WARPERS])
def test_typical_against_the_walker(processors: object) -> None:
    generator = torch.Generator().manual_seed(3)
    deep = 0
    for nodes in (1, 2, 5, 9, 14, 20):
        tree = random_tree("points", 16, nodes, generator)
        verified = verified_of(tree, generator, processors)  # type: ignore[arg-type]
        expected = [walked(Walker(verified, row)) for row in range(16)]
        assert answers(typical(verified)) == expected
        deep += sum(len(path) > 2 for path, _ in expected)
    assert deep > 10


def test_epsilon_and_delta_are_heard() -> None:
    generator = torch.Generator().manual_seed(4)
    verified = verified_of(random_tree("points", 40, 9, generator), generator)
    found = [answers(typical(verified, *bars)) for bars in ((0.09, 0.3), (0.4, 2.0), (1.0, 99.0))]
    expected = [walked(Walker(verified, row), 0.4, 2.0) for row in range(40)]
    assert found[1] == expected != found[0]
    assert {len(path) for path, _ in found[2]} == {1}


def test_rows_are_judged_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    verified = verified_of(random_tree("points", 6, 11, generator), generator, WARPERS)
    together = answers(typical(verified))
    for row in range(6):
        assert answers(typical(row_of(verified, row))) == together[row : row + 1]


def test_scores_that_are_no_distribution_show_as_minus_one() -> None:
    generator = torch.Generator().manual_seed(7)
    verified = verified_of(random_tree("points", 2, 9, generator), generator)
    verified.logits[1] = NAN
    assert answers(typical(verified))[1] == ([0], [-1])


def first_tokens(rule: object, rounds: int) -> Tensor:
    """How often each token comes first, of 4 with p = (.4, .3, .2, .1) and two top-k children."""
    shape = Topology.from_parents(torch.tensor([[-1, 0, 0]]), 1).expand(rounds)
    tokens, proposal_row = torch.tensor([[0, 0, 1]]).expand(rounds, -1), torch.full((rounds, 3), -1)
    tree = TokenTree(tokens, shape, None, proposal_row)
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log().expand(rounds, 3, -1)
    sampling = Sampling(torch.arange(rounds), None, torch.float64)
    lengths, text = torch.zeros(rounds).long(), Text(torch.zeros(rounds, 8).long(), 1)
    accepted = rule(Verified(tree, logits, sampling, lengths, text))  # type: ignore[operator]
    return accepted.tokens[:, 0].bincount(minlength=4) / rounds


def test_typical_is_not_exact_where_rejection_is() -> None:
    """The negative control of every proof of exactness; the tool calls the rule approximate."""
    from headstart.infer.rules.rejection import rejection

    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert (first_tokens(typical, 20_000) - law).abs().sum() / 2 > 0.5
    assert (first_tokens(rejection, 20_000) - law).abs().sum() / 2 < 0.02
    assert [name for name, rule in RULES.items() if not rule.exact] == ["typical"]
    assert (typical.__doc__ or "").count("Approximate") == 1
