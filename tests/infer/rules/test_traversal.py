"""The rules `traversal` and `block`: by hand, against a recursion, and the paper's chain."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from headstart.heads import OptionError, Sampling, TokenTree, Topology
from headstart.infer.rules import traversal as module
from headstart.infer.rules.registry import RULES
from headstart.infer.rules.rejection import rejection
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.rules.siblings import accept_probability
from headstart.infer.rules.traversal import node_weights, traversal
from headstart.infer.trees.parse import parse_static, parse_tree
from tests.support.walker import (
    KINDS,
    NAN,
    WARPERS,
    Walker,
    agrees_with_the_walker,
    answers,
    judges_rows_as_if_alone,
    never_accepts_a_drafter_of_nan,
    random_tree,
    vectors,
    verified_of,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [None, WARPERS])
def test_traversal_against_the_recursion(kind: str, processors: Any) -> None:
    agrees_with_the_walker(traversal, kind, processors)


@pytest.mark.parametrize("shape", ["chain:5", "cartesian:3,2,2", "[[0],[1],[0,0],[0,1],[1,0],[2]]"])
def test_shapes_that_the_host_knows_decide_alike(shape: str) -> None:
    """A static tree's children are known beforehand; without them the same comes out."""
    generator = torch.Generator().manual_seed(4)
    static, _ = parse_static(shape).shape(60, torch.device("cpu"))
    plain = Topology.from_parents(static.parents, static.max_depth)
    assert static.children is not None and plain.children is None
    tokens = torch.randint(7, (60, static.nodes), generator=generator)
    logits = torch.randn(60, static.nodes, 7, generator=generator, dtype=torch.float64)
    for rule in (traversal, rejection):
        both = []
        for topology in (static, plain):
            tree = TokenTree(tokens, topology, None, static.parents, logits)
            both.append(answers(rule(verified_of(tree, torch.Generator().manual_seed(5)))))
        assert both[0] == both[1] and max(len(path) for path, _ in both[0]) > 2


def test_the_recursion_notices_a_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the deepest flagged node in place of the first in post-order."""

    def deepest(shape: Topology, flagged: Tensor) -> Tensor:
        return shape.depth.masked_fill(~flagged, -1).argmax(1, keepdim=True)

    generator = torch.Generator().manual_seed(6)
    verified = verified_of(random_tree("without", 200, 9, generator), generator)
    monkeypatch.setattr(module, "first_flagged", deepest)
    found = answers(traversal(verified))
    assert found != [Walker(verified, row).traversal() for row in range(200)]


def test_rows_are_judged_as_if_alone() -> None:
    judges_rows_as_if_alone(traversal, "mixed")


def chain_of(p: Tensor, q: Tensor, tokens: Tensor) -> Verified:
    """A chain of `tokens` [B, L], the target's p [B, L + 1, V], the drafter's q [B, L, V]."""
    batch, length = tokens.shape
    parents = torch.arange(-1, length).expand(batch, -1)
    topology = Topology.from_parents(parents, length, 1)
    root = torch.zeros(batch, 1, dtype=torch.long)
    tree = TokenTree(torch.cat([root, tokens], 1), topology, None, parents, q.log())
    sampling = Sampling(torch.arange(batch), None, torch.float64)
    text = Text(torch.zeros(batch, 9, dtype=torch.long), 1)
    return Verified(tree, p.log(), sampling, torch.zeros(batch, dtype=torch.long), text)


def test_weights_by_hand() -> None:
    """The example of the module: token 0 is kept for the sake of token 1, never by itself."""
    p, q = vectors([0.5, 0.5], [0, 1], [0.3, 0.7]), vectors([1, 0], [0, 1])
    before, after = node_weights(chain_of(p[None], q[None], torch.tensor([[0, 1]])))
    assert before.tolist() == [[1, 0.5, 0.5]] and after.tolist() == [[1, 0, 0.5]]


def random_chains(length: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All drafts [B, L] of a random table, p and q along each, and their chances [B]."""
    tables = [torch.randn(vocab**level, 2, vocab).double() for level in range(length + 1)]
    drafts = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    p, q, chance = [], [], torch.ones(len(drafts), dtype=torch.float64)
    code = torch.zeros(len(drafts), dtype=torch.long)
    for level, table in enumerate(tables):
        here = (1.5 * table[code]).softmax(-1)
        p.append(here[:, 0])
        if level < length:
            q.append(here[:, 1])
            token = drafts[:, level : level + 1]
            chance = chance * q[-1].gather(1, token).squeeze(1)
            code = code * vocab + token.squeeze(1)
    return torch.stack(p, 1), torch.stack(q, 1), drafts, chance


def test_on_a_chain_the_weights_are_those_of_block_verification() -> None:
    """Sun et al. 2024, Algorithm 2, written as it stands there: p_i, and h_i for every prefix."""
    length, vocab = 4, 3
    p, q, drafts, _ = random_chains(length, vocab)
    before, after = node_weights(chain_of(p, q, drafts))
    ratio = torch.ones(len(drafts), dtype=torch.float64)
    for i in range(length + 1):
        assert torch.allclose(before[:, i], ratio, atol=1e-12)
        accept = ratio
        if 0 < i < length:
            excess = (ratio.unsqueeze(1) * p[:, i] - q[:, i]).clamp(min=0).sum(1)
            accept = excess / (excess + 1 - ratio)
        if i > 0:
            assert torch.allclose(after[:, i], accept.nan_to_num(1), atol=1e-12)
        if i < length:
            token = drafts[:, i : i + 1]
            step = (p[:, i].gather(1, token) / q[:, i].gather(1, token)).squeeze(1)
            ratio = (ratio * step).clamp(max=1)


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_no_fewer_than_rejection_in_expectation(seed: int) -> None:
    """Expected accepted tokens, summed over every draft; strictly more on all but a rare table."""
    torch.manual_seed(seed)
    p, q, drafts, chance = random_chains(3, 3)
    verified = chain_of(p, q, drafts)
    _, after = node_weights(verified)
    beaten, by_block = torch.ones_like(chance), torch.zeros_like(chance)
    for node in (3, 2, 1):  # the longest flagged prefix
        by_block += beaten * after[:, node] * node
        beaten = beaten * (1 - after[:, node])
    reached, by_rejection = torch.ones_like(chance), torch.zeros_like(chance)
    for level in range(3):
        token = drafts[:, level : level + 1]
        p_x, q_x = (side[:, level].gather(1, token).squeeze(1) for side in (p, q))
        reached = reached * accept_probability(p_x, q_x)
        by_rejection += reached
    block_tokens, rejection_tokens = (chance * by_block).sum(), (chance * by_rejection).sum()
    assert block_tokens >= rejection_tokens - 1e-12
    assert block_tokens > rejection_tokens + 1e-6


def test_block_is_traversal_and_takes_chains_alone() -> None:
    p, q, drafts, _ = random_chains(3, 3)
    assert RULES["block"].accept is RULES["traversal"].accept is traversal
    assert len({len(path) for path, _ in answers(traversal(chain_of(p, q, drafts)))}) == 4


def test_block_refuses_a_policy_that_branches_before_it_grows() -> None:
    for rule, tree in (("block", "chain:4"), ("block", "plain"), ("traversal", "cartesian:2,2")):
        RULES[rule].check_tree(parse_tree(tree))
    with pytest.raises(OptionError, match=r"takes a chain, found tree cartesian:2,2; .*'chain:2'"):
        RULES["block"].check_tree(parse_tree("cartesian:2,2"))
    with pytest.raises(OptionError, match=r"found tree sparse 2/1; .*'chain:2'"):
        RULES["block"].check_tree(parse_tree("[[0],[1],[0,0]]"))


def test_processors_that_read_the_text_are_refused() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    ngrams = NoRepeatNGramLogitsProcessor(2)
    counting = Sampling(torch.tensor([1]), type(WARPERS)([penalty, ngrams, *WARPERS]))
    biased = SequenceBiasLogitsProcessor([[[1, 2], 3.0]])
    reading = Sampling(torch.tensor([1]), type(WARPERS)([penalty, ngrams, biased, *WARPERS]))
    for rule in (name for name in RULES if not RULES[name].reads_prefix):
        RULES[rule].check_sampling(Sampling(torch.tensor([1]), WARPERS))
        RULES[rule].check_sampling(counting)
        with pytest.raises(OptionError, match=f"'{rule}'.* found SequenceBiasLogitsProcessor, "):
            RULES[rule].check_sampling(reading)
    RULES["rejection"].check_sampling(reading)


def test_scores_that_are_no_distribution_show_as_minus_one() -> None:
    """At the root, and at a node below it as often as that node would have been accepted."""
    generator = torch.Generator().manual_seed(7)
    verified = verified_of(random_tree("without", 60, 9, generator), generator)
    expected = [Walker(verified, row).traversal() for row in range(60)]
    verified.logits[30:] = NAN
    verified.logits[:30, 1] = NAN
    found = answers(traversal(verified))
    assert found[30:] == [([0], [-1])] * 30
    before, after = node_weights(verified)
    assert torch.equal(before[:30, 1], after[:30, 1]) and not before[:30, 1].isnan().any()
    through = [row for row in range(30) if 1 in found[row][0]]
    assert through and all(found[row] == ([0, 1], [int(found[row][1][0]), -1]) for row in through)
    untouched = [row for row in range(30) if not verified.tree.valid[row, 1]]  # type: ignore[index]
    assert untouched and all(found[row] == expected[row] for row in untouched)


def test_a_drafter_of_nan_is_only_never_accepted() -> None:
    never_accepts_a_drafter_of_nan(traversal)
