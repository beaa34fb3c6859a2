"""Static trees: how they grow, and the drafter calls that they make."""

from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from headstart.heads import Drafter, OptionError, Sampling, Step, TokenTree
from headstart.heads.core import Stream, place, row_seeds
from headstart.infer import Speculator, StaticTree
from headstart.infer.trees.children import Children
from headstart.infer.trees.expansions import SAMPLED
from headstart.infer.trees.parse import parse_static
from headstart.infer.trees.policy import Committed
from tests.support.scripted import ScriptedConfig, committed
from tests.support.syncs import NoSync
from tests.support.tiny import VOCAB, one_line, tiny

SPARSE = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1, 0]]


def mixed(chain: list[int], depth: int) -> Tensor:
    """Scores [V], a random draw keyed by all tokens of a chain and its depth."""
    key = depth
    for token in chain:
        key = (key * 1_000_003 + token + 1) % 2**31
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(key))


class Recorder(Drafter):
    """Level-wise; each node's proposals depend on the whole chain above it. Records every call."""

    config_class = ScriptedConfig

    def __init__(self, by_depth_only: bool = False) -> None:
        super().__init__(ScriptedConfig.for_target(tiny("llama")))
        self.by_depth_only, self.calls = by_depth_only, []

    def proposals(self, chain: list[int]) -> Tensor:
        return mixed([] if self.by_depth_only else chain, len(chain))

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.chains = [[[int(row[n - 1])]] for row, n in zip(tokens, count, strict=True)]
        self.calls.append(("begin", tokens.tolist(), count.tolist()))
        return self.answer([0])

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        self.calls.append(("extend", tokens.tolist(), parent.tolist()))
        first = len(self.chains[0])
        for row, chains in enumerate(self.chains):
            above = [chains[0] if at < 0 else chains[at + 1] for at in parent[row].tolist()]
            chains += [[*up, t] for up, t in zip(above, tokens[row].tolist(), strict=True)]
        return self.answer(range(first, len(self.chains[0])))

    def answer(self, nodes: Any) -> Step:
        rows = [[self.proposals(chains[node]) for node in nodes] for chains in self.chains]
        return Step(torch.stack([torch.stack(row) for row in rows]))


class AllAtOnce(Recorder):
    """The same proposals by depth, answered from one `begin`."""

    independent = True

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.calls.append(("begin", tokens.tolist(), count.tolist()))
        rows = torch.stack([mixed([], depth) for depth in range(1, 6)])
        return Step(rows.expand(len(tokens), -1, -1))


def grown_by_hand(tree: StaticTree, drafter: Recorder, root: int) -> list[int]:
    """Each node's token, from its rank path alone."""
    tokens = [root]
    chains = [[root]]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        token = int(drafter.proposals(chains[parent]).topk(rank + 1).indices[rank])
        tokens.append(token)
        chains.append([*chains[parent], token])
    return tokens


def random_paths(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    depths = torch.randint(1, 6, (7,), generator=generator).tolist()
    return [torch.randint(0, 4, (depth,), generator=generator).tolist() for depth in depths]


@pytest.mark.parametrize(
    "paths",
    [SPARSE, [[0]], [[3]], [[0, 0, 0, 0]], *[random_paths(seed) for seed in range(12)]],
    ids=lambda paths: f"{len(paths)}-{max(map(len, paths))}",
)
def test_levels_against_ranks_walked_by_hand(paths: list[list[int]]) -> None:
    tree, drafter = StaticTree(paths), Recorder()
    done = committed(3)
    grown = tree.grow(drafter, None, done, Children())
    assert isinstance(grown, TokenTree) and grown.valid is None
    assert grown.topology.parents.tolist() == [tree.parents] * 3
    assert (grown.proposal_row == -1).all()
    for row in range(3):
        assert grown.tokens[row].tolist() == grown_by_hand(tree, drafter, int(done.root[row]))
    # One begin with what was committed, then one extend a level, for nodes with children only.
    assert drafter.calls[0] == ("begin", done.tokens.tolist(), done.count.tolist())
    assert [call[0] for call in drafter.calls[1:]] == ["extend"] * (tree.max_depth - 1)
    inner = [len(call[1][0]) for call in drafter.calls[1:]]
    with_children = set(tree.parents[1:])
    assert inner == [
        sum(tree.depths[node] == depth for node in with_children)
        for depth in range(1, tree.max_depth)
    ]
    assert all(at == -1 for call in drafter.calls[1:2] for at in call[2][0])
    assert all(at >= 0 for call in drafter.calls[2:] for at in call[2][0])


@pytest.mark.parametrize("paths", [SPARSE, [[0, 0, 0]], *[random_paths(s) for s in range(6)]])
@pytest.mark.parametrize("expansion", ["topk", "coupled", *SAMPLED])
def test_independent_and_level_wise_grow_the_same_tree(
    paths: list[list[int]], expansion: Any
) -> None:
    tree, done = StaticTree(paths), committed(3)
    children = Children(expansion, Sampling(row_seeds(3, 3)))
    by_level = tree.grow(Recorder(by_depth_only=True), None, done, children)
    at_once = tree.grow(AllAtOnce(), None, done, children)
    assert torch.equal(by_level.tokens, at_once.tokens)
    if expansion != "topk":  # rows have their own seeds and positions
        assert not torch.equal(at_once.tokens[0, 1:], at_once.tokens[1, 1:])


def test_coupled_children_are_the_best_after_the_targets_noise() -> None:
    """Position by position: depth d under a root at `lengths` decides the token at lengths + d."""
    tree, done = StaticTree.cartesian([3, 2]), committed(2)
    noise = Sampling(row_seeds(9, 2))
    grown = tree.grow(AllAtOnce(), None, done, Children("coupled", noise))
    for row in range(2):
        for depth, nodes in ((1, [1, 2, 3]), (2, [4, 5])):
            position = torch.full((2, 1), int(done.lengths[row]) + depth)
            scores = noise.perturb(mixed([], depth).expand(2, 1, -1), position)[row, 0]
            assert grown.tokens[row, nodes].tolist() == scores.topk(len(nodes)).indices.tolist()


class Candidates(Recorder):
    """Candidates with gaps: one for depth 1, none below the first child, three elsewhere."""

    def answer(self, nodes: Any) -> Step:
        ids = torch.tensor([10, 11, 12]).expand(len(self.chains), len(list(nodes)), 3).clone()
        if len(self.chains[0]) == 1:
            ids[:, :, 1:] = -1
        return Step(ids=ids)


def test_candidates_that_are_missing_are_invalid() -> None:
    grown = StaticTree.cartesian([2, 4]).grow(Candidates(), None, committed(2), Children())
    assert grown.valid is not None
    # Root, two children (one found), four below each (three found: k is 3), none below a missing.
    assert grown.valid[0].int().tolist() == [1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert (grown.tokens >= 0).all()


def test_a_vocabulary_narrower_than_the_tree_leaves_nodes_empty() -> None:
    class Narrow(AllAtOnce):
        def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
            scores = torch.tensor([[0.0, 2.0, 1.0]]).expand(len(tokens), 5, 3)
            return Step(scores, vocabulary=torch.tensor([40, 50, 60]))

    grown = StaticTree([[0], [1], [2], [3], [0, 0]]).grow(Narrow(), None, committed(2), Children())
    assert grown.valid is not None and grown.valid[1].int().tolist() == [1, 1, 1, 1, 0, 1]
    assert grown.tokens[1, 1:4].tolist() == [50, 60, 40] and grown.tokens[1, 5] == 50
    whole = StaticTree([[0], [1], [2]]).grow(Narrow(), None, committed(2), Children())
    assert whole.valid is None


class Fixed(Drafter):
    """Logits by depth alone, [D, Vd], level by level; waits for no device."""

    config_class = ScriptedConfig

    def __init__(self, logits: Tensor, vocabulary: Tensor | None = None) -> None:
        super().__init__(ScriptedConfig.for_target(tiny("llama")))
        self.table, self.vocabulary = logits, vocabulary

    def answer(self, first: int, last: int, batch: int, nodes: int) -> Step:
        rows = self.table[first:last].expand(batch, -1, -1)
        return Step(rows if self.independent else rows.expand(-1, nodes, -1), self.vocabulary)

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.depth = 1
        return self.answer(0, len(self.table) if self.independent else 1, len(tokens), 1)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        self.depth += 1
        return self.answer(self.depth - 1, self.depth, *tokens.shape)


class FixedAtOnce(Fixed):
    independent = True


def fixed(logits: Tensor, at_once: bool, vocabulary: Tensor | None = None) -> Fixed:
    return (FixedAtOnce if at_once else Fixed)(logits, vocabulary)


ROWS = 20_000
Q = torch.tensor([0.45, 0.3, 0.15, 0.1])


def many(batch: int = ROWS) -> Committed:
    ones = torch.ones(batch, 1, dtype=torch.long)
    return Committed(torch.zeros(batch, 1, 0), ones, ones[:, 0], torch.full((batch,), 6))


def drawn(expansion: Any, tree: str, at_once: bool, warpers: Any = None) -> TokenTree:
    """A tree for each of many seeds, with the same q at every node."""
    drafter = fixed(Q.log().expand(3, -1), at_once)
    children = Children(expansion, Sampling(row_seeds(4, ROWS), warpers))
    return parse_static(tree).grow(drafter, None, many(), children)


def distance(tokens: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations chi-square of the rows' tuples [rows, n] is above its mean."""
    assert abs(sum(expected.values()) - 1) < 1e-6
    key = (tokens * len(Q) ** torch.arange(tokens.shape[1])).sum(1)
    counts = torch.bincount(key, minlength=len(Q) ** tokens.shape[1]).tolist()
    statistic, seen = 0.0, 0
    for path, probability in expected.items():
        count = counts[sum(token * len(Q) ** place for place, token in enumerate(path))]
        statistic += (count - ROWS * probability) ** 2 / (ROWS * probability)
        seen += count
    if seen < len(tokens):
        return float("inf")  # what cannot be drawn was drawn
    free = len(expected) - 1
    return (statistic - free) / (2 * free) ** 0.5


def plackett_luce(count: int) -> dict[tuple[int, ...], float]:
    """Probabilities of ordered draws without replacement, each from what is left."""
    table = {}
    for path in permutations(range(len(Q)), count):
        probability, left = 1.0, 1.0
        for token in path:
            probability *= float(Q[token]) / left
            left -= float(Q[token])
        table[path] = probability
    return table


def independent(count: int) -> dict[tuple[int, ...], float]:
    return {path: float(Q[list(path)].prod()) for path in product(range(len(Q)), repeat=count)}


@pytest.mark.parametrize("at_once", [False, True])
def test_children_without_replacement_follow_plackett_luce(at_once: bool) -> None:
    tree = drawn("without_replacement", "cartesian:3,2", at_once)
    assert tree.valid is not None and tree.valid.all() and not tree.replacement
    assert distance(tree.tokens[:, 1:4], plackett_luce(3)) < 4
    for first in (4, 6, 8):
        assert distance(tree.tokens[:, first : first + 2], plackett_luce(2)) < 4
    assert distance(tree.tokens[:, 1:3], independent(2)) > 100
    assert distance(tree.tokens[:, [2, 1, 3]], plackett_luce(3)) > 100  # siblings keep their order


@pytest.mark.parametrize("at_once", [False, True])
def test_children_with_replacement_are_independent_draws(at_once: bool) -> None:
    tree = drawn("with_replacement", "cartesian:3,2", at_once)
    assert tree.valid is not None and tree.valid.all() and tree.replacement
    assert distance(tree.tokens[:, 1:4], independent(3)) < 4
    assert distance(tree.tokens[:, 1:3], plackett_luce(2)) > 100


@pytest.mark.parametrize("expansion", SAMPLED)
@pytest.mark.parametrize("at_once", [False, True])
def test_parents_draw_by_themselves(expansion: Any, at_once: bool) -> None:
    tree = drawn(expansion, "cartesian:2,2,1", at_once)
    # Children of different parents, of one depth and of two; parents and children.
    for nodes in ([3, 5], [7, 8], [7, 10], [1, 3], [3, 7], [1, 7]):
        assert distance(tree.tokens[:, nodes], independent(2)) < 4


@pytest.mark.parametrize("expansion", SAMPLED)
def test_draws_share_no_noise_with_the_target(expansion: Any) -> None:
    """Only `coupled` children may: a rule that weighs draws would be biased."""
    tree, noisy = (drawn(kind, "chain:2", True).tokens for kind in (expansion, "coupled"))
    for node in (1, 2):
        assert distance(torch.stack([tree[:, node], noisy[:, node]], 1), independent(2)) < 4


def test_draws_are_keyed_by_position_parent_and_their_own_stream() -> None:
    sampling, done = Sampling(row_seeds(4, 5)), many(5)
    drafter, tree = fixed(torch.randn(2, 6), True), StaticTree.cartesian([2, 2])
    grown = tree.grow(drafter, None, done, Children("without_replacement", sampling))
    for parent, depth, nodes in ((0, 1, [1, 2]), (1, 2, [3, 4]), (2, 2, [5, 6])):
        log_q = drafter.table[depth - 1].log_softmax(-1).expand(5, 1, -1)
        key = place(torch.full((5, 1), 6 + depth), torch.tensor([parent]))
        noisy = sampling.perturb(log_q, key, stream=Stream.CHILDREN).squeeze(1)
        assert torch.equal(grown.tokens[:, nodes], noisy.topk(2).indices)


def with_warper(warper: Any) -> LogitsProcessorList:
    return LogitsProcessorList([warper])


@pytest.mark.parametrize("at_once", [False, True])
def test_nothing_takes_the_place_of_children_that_q_has_none_for(at_once: bool) -> None:
    for warper in (TopKLogitsWarper(2), TopPLogitsWarper(0.7)):
        tree = drawn("without_replacement", "cartesian:4,3", at_once, with_warper(warper))
        assert tree.valid is not None
        # Two of four children, and two of three below each of those; none below the others.
        expected = [1, *[1, 1, 0, 0], *[1, 1, 0], *[1, 1, 0], *[0] * 6]
        assert (tree.valid == torch.tensor(expected, dtype=torch.bool)).all()
        assert (tree.tokens[:, 1:3].sort(1).values == torch.tensor([0, 1])).all()
        assert (tree.tokens.masked_fill(tree.valid, 0) == 0).all()
        again = drawn("with_replacement", "cartesian:4,3", at_once, with_warper(warper))
        assert again.valid is not None and again.valid.all()
        assert again.tokens[:, 1:].max() == 1


@pytest.mark.parametrize("expansion", SAMPLED)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_proposals_that_are_no_distribution_draw_nothing(expansion: Any, broken: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = broken
    for at_once in (False, True):
        children = Children(expansion, Sampling(row_seeds(0, 2)))
        tree = StaticTree.cartesian([2, 2]).grow(fixed(logits, at_once), None, many(2), children)
        assert tree.valid is not None
        assert tree.valid[0].int().tolist() == [1, 1, 1, 0, 0, 0, 0]
        assert (tree.tokens >= 0).all()


@pytest.mark.parametrize("expansion", SAMPLED)
@pytest.mark.parametrize("paths", [[[0]], [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]]])
def test_a_node_knows_the_row_it_was_drawn_from(paths: Any, expansion: Any) -> None:
    """Under top-k of 1 a draw is the best of its row, so the row can be told from the token."""
    tree, done, drafter = StaticTree(paths), committed(3), Recorder()
    children = Children(expansion, Sampling(row_seeds(1, 3)))
    grown = tree.grow(drafter, None, done, children)
    assert grown.logits is not None and (grown.proposal_row[:, 0] == -1).all()
    assert grown.logits.shape[1] == len(set(tree.parents[1:]))
    for row in range(3):
        chains = [[int(done.root[row])]]
        for node in range(1, tree.nodes):
            parent, proposal_row = tree.parents[node], int(grown.proposal_row[row, node])
            assert torch.equal(grown.logits[row, proposal_row], drafter.proposals(chains[parent]))
            chains.append([*chains[parent], int(grown.tokens[row, node])])
    sure = Children("with_replacement", Sampling(row_seeds(1, 3), with_warper(TopKLogitsWarper(1))))
    grown = tree.grow(Recorder(), None, done, sure)
    assert grown.logits is not None
    best = grown.logits.argmax(-1).gather(1, grown.proposal_row[:, 1:])
    assert torch.equal(grown.tokens[:, 1:], best)


@pytest.mark.parametrize("expansion", SAMPLED)
def test_parents_share_the_row_of_an_independent_head(expansion: Any) -> None:
    table, ids = torch.randn(5, 6), torch.tensor([40, 3, 17, 8, 25, 31])
    drafter, tree = fixed(table, True, ids), StaticTree.cartesian([3, 2, 1])
    grown = tree.grow(drafter, None, many(3), Children(expansion, Sampling(row_seeds(1, 3))))
    assert torch.equal(grown.proposal_row, grown.topology.depth - 1)
    assert grown.logits is not None and torch.equal(grown.logits, table.expand(3, -1, -1))
    assert grown.vocabulary is ids and grown.replacement == (expansion == "with_replacement")
    assert torch.isin(grown.tokens[:, 1:], ids).all()


@pytest.mark.parametrize("expansion", SAMPLED)
def test_candidates_are_point_masses_whatever_the_expansion(expansion: Any) -> None:
    children = Children(expansion, Sampling(row_seeds(1, 2)))
    tree, done = StaticTree.cartesian([2, 4]), committed(2)
    grown, ranked = (tree.grow(Candidates(), None, done, c) for c in (children, Children()))
    assert torch.equal(grown.tokens, ranked.tokens)
    assert grown.valid is not None and ranked.valid is not None
    assert torch.equal(grown.valid, ranked.valid)
    assert grown.logits is None and (grown.proposal_row == -1).all() and not grown.replacement


@pytest.mark.parametrize("expansion", SAMPLED)
def test_a_row_alone_draws_the_same_children(expansion: Any) -> None:
    tree, seeds, done = StaticTree.cartesian([3, 2, 2]), row_seeds(5, 3), committed(3)
    whole = tree.grow(Recorder(), None, done, Children(expansion, Sampling(seeds)))
    for row in range(3):
        one = slice(row, row + 1)
        mine = Committed(done.features[one], done.tokens[one], done.count[one], done.lengths[one])
        alone = tree.grow(Recorder(), None, mine, Children(expansion, Sampling(seeds[one])))
        assert torch.equal(alone.tokens[0], whole.tokens[row])
    # A later round draws anew, and so does another seed.
    later = Committed(done.features, done.tokens, done.count, done.lengths + 1)
    again = tree.grow(Recorder(), None, later, Children(expansion, Sampling(seeds)))
    other = tree.grow(Recorder(), None, done, Children(expansion, Sampling(seeds + 1)))
    for changed in (again, other):
        assert all(not torch.equal(changed.tokens[row], whole.tokens[row]) for row in range(3))


@pytest.mark.parametrize("expansion", SAMPLED)
@pytest.mark.parametrize("at_once", [False, True])
def test_drawing_does_not_wait(expansion: Any, at_once: bool) -> None:
    drafter, done = fixed(torch.randn(3, 6), at_once), many(2)
    warpers = LogitsProcessorList([TopKLogitsWarper(4), TopPLogitsWarper(0.8)])
    children = Children(expansion, Sampling(row_seeds(1, 2), warpers))
    tree = StaticTree.cartesian([3, 2, 1])
    tree.grow(drafter, None, done, children)  # its shape is made once
    with torch.no_grad(), NoSync():
        tree.grow(drafter, None, done, children)


def test_gaps_of_rank_are_refused_under_distinct_draws() -> None:
    drafter: Any = SimpleNamespace(max_depth=None)
    for paths in ([[1]], [[0], [2]], [[0], [0, 1]], SPARSE):
        for expansion in ("topk", "coupled", "with_replacement"):
            StaticTree(paths).check(drafter, expansion)
        with pytest.raises(OptionError, match="biases children drawn without") as caught:
            StaticTree(paths).check(drafter, "without_replacement")
        one_line(caught.value)
    for whole in ("plain", "chain:3", "cartesian:3,2", "[[0],[1],[1,0],[1,1]]"):
        for expansion in SAMPLED:
            parse_static(whole).check(drafter, expansion)


def test_plain_asks_no_drafter() -> None:
    drafter = Recorder()
    grown = StaticTree([]).grow(drafter, None, committed(3), Children())
    assert grown.nodes == 1 and not drafter.calls


def test_what_a_drafter_cannot_fill_is_refused() -> None:
    with pytest.raises(OptionError, match=r"chain:2 needs a drafter") as caught:
        Speculator(tiny("llama"), None, tree="chain:2")
    one_line(caught.value)
    bounded: Any = SimpleNamespace(max_depth=2)
    StaticTree.chain(2).check(bounded)
    with pytest.raises(OptionError, match=r"chain:3 is 3 deep.*proposes 2") as caught:
        StaticTree.chain(3).check(bounded)
    one_line(caught.value)
