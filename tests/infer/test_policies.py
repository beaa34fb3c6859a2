"""Static trees: how they are written, how they grow, and the drafter calls that they make."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import ScriptedConfig
from tiny import VOCAB, one_line, tiny
from torch import Tensor

from headstart.heads import Drafter, OptionError, Sampling, Step, TokenTree
from headstart.heads.core import row_seeds
from headstart.infer import Speculator, StaticTree
from headstart.infer.policies import Children, Committed

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


def committed(batch: int) -> Committed:
    tokens = torch.randint(VOCAB, (batch, 3))
    count = torch.tensor([3, 1, 2][:batch])
    root = tokens.gather(1, (count - 1).unsqueeze(1))  # [B, 1]
    return Committed(torch.zeros(batch, 3, 0), tokens, count, root, torch.tensor([7, 4, 9][:batch]))


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
    assert (grown.qrow == -1).all()
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
@pytest.mark.parametrize("noisy", [False, True])
def test_independent_and_level_wise_grow_the_same_tree(paths: list[list[int]], noisy: bool) -> None:
    tree, done = StaticTree(paths), committed(3)
    children = Children("coupled", Sampling(row_seeds(3, 3))) if noisy else Children()
    by_level = tree.grow(Recorder(by_depth_only=True), None, done, children)
    at_once = tree.grow(AllAtOnce(), None, done, children)
    assert torch.equal(by_level.tokens, at_once.tokens)
    if noisy:  # rows have their own seeds and positions
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
    # Root, two children (one found), four below each (three found: k is 3).
    assert grown.valid[0].int().tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0]
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


def test_plain_asks_no_drafter() -> None:
    drafter = Recorder()
    grown = StaticTree([]).grow(drafter, None, committed(3), Children())
    assert grown.nodes == 1 and not drafter.calls


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("plain", []),
        ("chain:1", [[0]]),
        ("chain:3", [[0], [0, 0], [0, 0, 0]]),
        ("cartesian:2,1", [[0], [1], [0, 0], [1, 0]]),
        ("[[0],[1],[0,0]]", [[0], [1], [0, 0]]),
        ([[0, 1]], [[0], [0, 1]]),
        (((1,), (0,)), [[0], [1]]),
    ],
)
def test_forms(text: Any, paths: list[list[int]]) -> None:
    tree = StaticTree.parse(text)
    assert [list(path) for path in tree.paths] == paths
    assert tree.nodes == len(paths) + 1
    assert tree.max_depth == max(map(len, paths), default=0)
    assert StaticTree.parse(tree.paths).parents == tree.parents


def test_a_file_of_paths(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(SPARSE))
    assert StaticTree.parse(str(file)).paths == StaticTree(SPARSE).paths


@pytest.mark.parametrize(
    "text",
    [
        "bush:3",
        "chain:",
        "chain:three",
        "chain:-2",
        "cartesian:2,x",
        "cartesian:2,0",
        "cartesian:-1",
        "",
        "[[0],",
        "[[0],[]]",
        "[[-1]]",
        "[0, 1]",
        '[["a"]]',
        "[[0.5]]",
        '{"paths": 1}',
        "no/such/file.json",
        [[0], [-1]],
        [[]],
        [["a"]],
        [0, 1],
    ],
    ids=repr,
)
def test_bad_forms_are_one_line(text: Any) -> None:
    with pytest.raises(OptionError) as caught:
        StaticTree.parse(text)
    assert "tree" in one_line(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text('{"a": \n [')
    with pytest.raises(OptionError, match=r"tree\.json") as caught:
        StaticTree.parse(str(file))
    one_line(caught.value)


def test_names() -> None:
    assert str(StaticTree([])) == "plain" and str(StaticTree.chain(3)) == "chain:3"
    assert str(StaticTree(SPARSE)) == "sparse:2/3/2/1"


def test_what_a_drafter_cannot_fill_is_refused() -> None:
    with pytest.raises(OptionError, match=r"chain:2 needs a drafter") as caught:
        Speculator(tiny("llama"), None, tree="chain:2")
    one_line(caught.value)
    bounded: Any = SimpleNamespace(max_depth=2)
    StaticTree.chain(2).check(bounded)
    with pytest.raises(OptionError, match=r"chain:3 is 3 deep.*proposes 2") as caught:
        StaticTree.chain(3).check(bounded)
    one_line(caught.value)
