"""Best-first and beam trees, against a heap and a search over every path, and in the loop."""

import heapq
import itertools
import math
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from headstart.heads import Drafter, OptionError, Sampling, Step, TokenTree
from headstart.heads.core import row_seeds
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Beam, BestFirst, Decoding, StaticTree
from headstart.infer.trees.children import Children
from headstart.infer.trees.parse import parse_tree
from tests.support.covering import covering
from tests.support.scripted import SHAPES, ScriptedConfig, committed, decoding_of, make, rows_of
from tests.support.syncs import NoSync
from tests.support.tiny import one_line, prompts, tiny

WORDS = 6
Path = tuple[int, ...]


class Table(Drafter):
    """Logits [rows, depth, ...]: a random draw for each row of the batch and each path."""

    config_class = ScriptedConfig

    def __init__(self, vocabulary: Tensor | None = None, seed: int = 0) -> None:
        super().__init__(ScriptedConfig.for_target(tiny("llama")))
        self.vocabulary, self.seed = vocabulary, seed

    def logits_of(self, row: int, path: Path) -> Tensor:
        """[WORDS] of the children of a path of columns."""
        key = self.seed * 64 + row + 1
        for column in path:
            key = (key * 1_000_003 + column + 1) % 2**31
        return 2 * torch.randn(WORDS, generator=torch.Generator().manual_seed(key))

    def columns(self, tokens: list[int]) -> Path:
        if self.vocabulary is None:
            return tuple(tokens)
        known = self.vocabulary.tolist()
        return tuple(known.index(token) if token in known else 0 for token in tokens)

    def answer(self, paths: list[list[Path]]) -> Step:
        rows = [[self.logits_of(row, path) for path in some] for row, some in enumerate(paths)]
        return Step(torch.stack([torch.stack(row) for row in rows]), self.vocabulary)

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self.grown: list[list[Path]] = [[()] for _ in tokens]
        self.extended = [1]
        return self.answer(self.grown)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        self.extended.append(tokens.shape[1])
        new = [
            [(*paths[up + 1], *self.columns([token])) for token, up in zip(*row, strict=True)]
            for paths, row in zip(
                self.grown, zip(tokens.tolist(), parent.tolist(), strict=True), strict=True
            )
        ]
        for paths, more in zip(self.grown, new, strict=True):
            paths += more
        return self.answer(new)


class Marginals(Table):
    """The same by depth alone, answered at once; a row more than the trees are deep."""

    independent = True

    def logits_of(self, row: int, path: Path) -> Tensor:
        return super().logits_of(row, (0,) * len(path))

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        return self.answer([[(0,) * depth for depth in range(5)] for _ in tokens])


def logp(drafter: Table, row: int, path: Path) -> list[float]:
    return drafter.logits_of(row, path).double().log_softmax(-1).tolist()


def by_heap(drafter: Table, row: int, nodes: int, width: int, depth: int) -> set[Path]:
    """The best nodes - 1 paths: take the best of the heap, put its children there."""
    heap: list[tuple[float, Path]] = [(0.0, ())]
    taken: list[Path] = []
    while len(taken) < nodes:
        score, path = heapq.heappop(heap)
        taken.append(path)
        if len(path) < depth:
            children = enumerate(logp(drafter, row, path))
            ranked = sorted(children, key=lambda item: -item[1])[:width]
            for column, value in ranked:
                heapq.heappush(heap, (score - value, (*path, column)))
    return set(taken[1:])


def by_levels(
    drafter: Table, row: int, nodes: int, width: int, depth: int, frontier: int
) -> set[Path]:
    """EAGLE-2 in lists: the best `frontier` of a level are extended, the best of all are kept."""
    extended: list[tuple[float, Path]] = [(0.0, ())]
    candidates: list[tuple[float, Path]] = []
    for _ in range(depth):
        level = []
        for score, path in extended:
            ranked = sorted(enumerate(logp(drafter, row, path)), key=lambda item: -item[1])
            level += [(score + value, (*path, column)) for column, value in ranked[:width]]
        candidates += level
        extended = sorted(level, reverse=True)[:frontier]
    return {path for _, path in sorted(candidates, reverse=True)[: nodes - 1]}


def by_beams(drafter: Table, row: int, width: int, length: int) -> list[Path]:
    """The final beams, best first, of a search that looks at every token of every beam."""
    beams: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(length):
        longer = [
            (score + value, (*path, column))
            for score, path in beams
            for column, value in enumerate(logp(drafter, row, path))
        ]
        beams = sorted(longer, reverse=True)[:width]
    return [path for _, path in beams]


def paths_of(tree: TokenTree, row: int, drafter: Table | None = None) -> list[Path]:
    """The paths of a row's valid nodes, in columns of the drafter; checks the tree on the way."""
    assert tree.valid is not None
    parents, tokens = tree.topology.parents[row].tolist(), tree.tokens[row].tolist()
    valid = tree.valid[row].tolist()
    found: list[Path] = [()]
    assert parents[0] == -1 and valid[0]
    missing = valid.index(False) if False in valid else len(valid)
    assert not any(valid[missing:]), "missing nodes come last"
    for node in range(1, missing):
        assert 0 <= parents[node] < node
        found.append((*found[parents[node]], tokens[node]))
    assert all(parents[node] == 0 and tokens[node] == 0 for node in range(missing, len(valid))), (
        "missing nodes hang on the root"
    )
    assert [len(path) for path in found] == tree.topology.depth[row, :missing].tolist()
    assert [len(path) for path in found] == sorted(map(len, found)), "level by level"
    assert len(set(found)) == len(found), "no path twice"
    children = [parents[1:missing].count(node) for node in range(missing)]
    assert max(children) <= tree.topology.width
    found = found[1:]
    return found if drafter is None else [drafter.columns(list(path)) for path in found]


def grow(tree: Any, drafter: Drafter, batch: int = 3, children: Any = None) -> TokenTree:
    grown = tree.grow(drafter, None, committed(batch), children or Children())
    assert grown.tokens.shape == (batch, tree.nodes) and (grown.proposal_row == -1).all()
    assert grown.logits is None
    return grown


VOCABULARY = torch.tensor([40, 3, 17, 8, 25, 31])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafter", [Table, Marginals])
@pytest.mark.parametrize("numbers", [(2, 1, 1), (4, 1, 3), (12, 3, 4), (20, 6, 3), (30, 3, 3)])
def test_best_first_equals_a_heap(
    numbers: tuple[int, int, int], drafter: type[Table], seed: int
) -> None:
    """Where as many nodes are extended as the tree has, the set is the best there is."""
    nodes, width, depth = numbers
    table = drafter(VOCABULARY if seed else None, seed)
    frontier = None if table.independent and seed else nodes - 1
    grown = grow(BestFirst(nodes, width, depth, frontier), table)
    shapes = set()
    for row in range(3):
        found = paths_of(grown, row, table)
        assert set(found) == by_heap(table, row, nodes, width, depth)
        assert len(found) == nodes - 1
        shapes.add(tuple(grown.topology.parents[row].tolist()))
    assert len(shapes) > 1 or nodes < 6, "rows grow their own trees"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "numbers", [(9, 3, 4, None), (9, 3, 4, 1), (7, 4, 2, 2), (13, 3, 5, 3), (20, 2, 4, 7)]
)
def test_best_first_extends_its_frontier(numbers: tuple, seed: int) -> None:
    nodes, width, depth, frontier = numbers
    table = Table(seed=seed)
    grown = grow(BestFirst(*numbers), table)
    for row in range(3):
        expected = by_levels(table, row, nodes, width, depth, frontier or width)
        assert set(paths_of(grown, row)) == expected
    assert len(table.extended) == depth
    assert all(count <= (frontier or width) for count in table.extended)


def test_children_that_follow_for_certain_come_after_their_parents() -> None:
    """Log-probability 0 leaves a child as good as its parent, which must still be kept first."""

    class Sure(Table):
        def logits_of(self, row: int, path: Path) -> Tensor:
            return torch.full((WORDS,), -math.inf).scatter(0, torch.tensor([row]), 0.0)

    grown = grow(BestFirst(3, 2, 2), Sure())
    assert [paths_of(grown, row) for row in range(3)] == [[(row,), (row, row)] for row in range(3)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafter", [Table, Marginals])
@pytest.mark.parametrize("numbers", [(1, 3), (2, 1), (3, 4), (6, 3), (8, 4)])
def test_beams_equal_a_search_over_every_token(
    numbers: tuple[int, int], drafter: type[Table], seed: int
) -> None:
    width, length = numbers
    table = drafter(VOCABULARY if seed else None, seed)
    grown = grow(Beam(width, length), table)
    for row in range(3):
        beams = by_beams(table, row, width, length)
        prefixes = {path[: n + 1] for path in beams for n in range(length)}
        assert set(paths_of(grown, row, table)) == prefixes
    if width > 2 and length > 2:
        assert grown.valid is not None and not grown.valid.all(), "beams share what they begin with"


def test_fewer_nodes_keep_the_best_beams() -> None:
    table = Table(seed=5)
    for nodes in range(5, 14):
        grown = grow(Beam(3, 4, nodes), table)
        for row in range(3):
            wanted: dict[Path, None] = {}
            for path in by_beams(table, row, 3, 4):
                wanted |= dict.fromkeys(path[: n + 1] for n in range(4))
            assert set(paths_of(grown, row)) == set(list(wanted)[: nodes - 1])


class Listed(Table):
    """Candidates alone: [0 1 2], fewer the deeper; none after a 1, and none at depth 3."""

    def answer(self, paths: list[list[Path]]) -> Step:
        ids = torch.tensor([[self.after(path) for path in some] for some in paths])
        return Step(ids=ids)

    def after(self, path: Path) -> list[int]:
        if len(path) == 2 or path[-1:] == (1,):
            return [-1, -1, -1]
        return [0, 1, 2] if not path else [0, 1, -1]


def test_candidates_are_ranked_by_their_order() -> None:
    found = paths_of(grow(BestFirst(8, 4, 4), Listed()), 0)
    # Scores 0, -1, -2 below the root; 0, -1 below 0 and -2, -3 below 2; nothing below 1.
    assert found == [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 1)]
    assert len(paths_of(grow(BestFirst(12, 4, 4), Listed()), 0)) == 7
    assert paths_of(grow(BestFirst(5, 4, 4), Listed()), 0) == [(0,), (1,), (0, 0), (0, 1)]


def test_a_beam_search_that_runs_dry_ends_there() -> None:
    assert set(paths_of(grow(Beam(2, 4), Listed()), 0)) == {(0,), (0, 0), (0, 1)}
    assert set(paths_of(grow(Beam(3, 2), Listed()), 0)) == {(0,), (2,), (0, 0), (0, 1), (2, 0)}

    class Nothing(Listed):
        def after(self, path: Path) -> list[int]:
            return [-1]

    for tree in (Beam(2, 3), BestFirst(4, 2, 2)):
        grown = grow(tree, Nothing())
        assert grown.valid is not None and grown.valid.sum(1).tolist() == [1, 1, 1]


def test_what_the_warpers_rule_out_is_not_grown() -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)])
    children = Children("topk", Sampling(row_seeds(1, 3), warpers))
    for tree in (BestFirst(31, 4, 4), Beam(4, 3)):
        table = Table()
        grown = grow(tree, table, children=children)
        for row in range(3):
            for path in paths_of(grown, row):
                best = table.logits_of(row, path[:-1]).topk(2).indices.tolist()
                assert path[-1] in best


def test_no_numbers_propose_nothing() -> None:
    class Broken(Table):
        def logits_of(self, row: int, path: Path) -> Tensor:
            good = super().logits_of(row, path)
            return torch.full_like(good, math.nan) if row == 1 else good

    for tree in (BestFirst(9, 3, 3), Beam(3, 3)):
        grown, whole = grow(tree, Broken()), grow(tree, Table())
        assert grown.valid is not None and grown.valid[1].tolist() == [True] + [False] * (
            tree.nodes - 1
        )
        assert paths_of(grown, 0) == paths_of(whole, 0)
        assert paths_of(grown, 2) == paths_of(whole, 2)


class Known(Table):
    """The same as candidates, with their log-probabilities and two that are none."""

    def answer(self, paths: list[list[Path]]) -> Step:
        found = super().answer(paths)
        assert found.logits is not None
        log_probs, ids = found.logits.log_softmax(-1).sort(dim=-1, descending=True)
        none = torch.full_like(ids[..., :2], -1)
        return Step(
            ids=torch.cat([found.named(ids), none], -1),
            log_probs=torch.cat([log_probs, none * math.inf], -1),
        )


@pytest.mark.parametrize("expansion", ["topk", "coupled"])
@pytest.mark.parametrize("tree", [BestFirst(12, 3, 4), Beam(3, 4), StaticTree.cartesian([3, 2, 2])])
def test_candidates_of_known_probability_count_like_logits(tree: Any, expansion: Any) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(4)])
    children, done = Children(expansion, Sampling(row_seeds(1, 3), warpers)), committed(3)
    for vocabulary in (None, torch.tensor([3, 4, 8, 9, 12, 13])):
        expected = tree.grow(Table(vocabulary), None, done, children)
        found = tree.grow(Known(vocabulary), None, done, children)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.topology.parents, expected.topology.parents)


@pytest.mark.parametrize("expansion", ["topk", "coupled"])
@pytest.mark.parametrize("tree", [BestFirst(12, 3, 4), Beam(3, 4)], ids=str)
def test_a_row_alone_grows_the_same_tree(tree: Any, expansion: Any) -> None:
    seeds, done = row_seeds(8, 3), committed(3)
    whole = tree.grow(Table(), None, done, Children(expansion, Sampling(seeds)))
    one = done.__class__(done.features[:1], done.tokens[:1], done.count[:1], done.lengths[:1])
    alone = tree.grow(Table(), None, one, Children(expansion, Sampling(seeds[:1])))
    assert torch.equal(alone.tokens, whole.tokens[:1])
    assert torch.equal(alone.topology.parents, whole.topology.parents[:1])
    assert torch.equal(alone.valid, whole.valid[:1])


def test_coupled_children_are_ranked_after_the_noise() -> None:
    table, sampling, done = Table(), Sampling(row_seeds(2, 3)), committed(3)
    grown = BestFirst(4, 3, 1).grow(table, None, done, Children("coupled", sampling))
    scores = torch.stack([table.logits_of(row, ()) for row in range(3)]).unsqueeze(1)
    noisy = sampling.perturb(scores, done.lengths.unsqueeze(1) + 1).squeeze(1)
    assert grown.tokens[:, 1:].tolist() == noisy.topk(3).indices.tolist()
    assert grown.tokens[:, 1:].tolist() != scores.squeeze(1).topk(3).indices.tolist()


# In the loop

NEW = 20
LENGTHS = {1: [11], 4: [13, 7, 10, 3]}
TREES = ["best-first:12,3,4", "best-first:6,2,4,1", "beam:3,4", "beam:3,4,8"]


def medusa() -> Medusa:
    drafter = Medusa(MedusaConfig.for_target(tiny("llama"), heads=4)).double()
    drafter.bind(tiny("llama"))
    torch.nn.init.normal_(drafter.weight, std=0.05)
    return drafter.eval()


def drafters(script: Tensor, rows: list[list[int]] | None = None) -> dict[str, Drafter]:
    found: dict[str, Drafter] = {"medusa": medusa()}
    for shape in SHAPES:
        found[shape] = make(shape, tiny("llama"), script, scale=3.0, prompts=rows)
    return found


def sampling_of(rule: str, batch: int) -> Sampling:
    if rule == "greedy":
        return Sampling()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(20)])
    return Sampling(row_seeds(3, batch), warpers)


def decode(
    drafter: Drafter | None, tree: Any, rule: str, batch: int, new: int = NEW
) -> tuple[Tensor, Decoding]:
    """New tokens [B, new], and the loop that wrote them."""
    ids, mask = prompts(LENGTHS[batch])
    expansion: Any = "coupled" if rule == "coupled" else "topk"
    sampling = sampling_of(rule, batch)
    decoding = decoding_of(tiny("llama"), drafter, tree, sampling, expansion=expansion)
    with torch.no_grad():
        for _ in decoding.run(ids, mask, new):
            pass
    return decoding.sequences[:, ids.shape[1] :], decoding


@cache
def plain(rule: str, batch: int) -> Tensor:
    """Longer than the tests decode, for drafters that peek."""
    return decode(None, StaticTree([]), rule, batch, NEW + 8)[0]


@pytest.mark.parametrize(
    ("tree", "rule", "batch"),
    covering([*product(TREES, ("greedy", "match", "coupled"), LENGTHS)]),
)
def test_the_text_is_that_of_plain_decoding(tree: str, rule: str, batch: int) -> None:
    expected = plain(rule, batch)
    rows = rows_of(*prompts(LENGTHS[batch])) if rule == "greedy" else None
    for name, drafter in drafters(expected, rows).items():
        out, decoding = decode(drafter, parse_tree(tree), rule, batch)
        assert torch.equal(out, expected[:, :NEW]), name
        assert decoding.stats.tau > 1 or name == "medusa", name


def test_the_right_token_is_found() -> None:
    """A drafter that knows the text and says so is followed to the full depth."""
    drafter = make("cached", tiny("llama"), plain("greedy", 4), "always", scale=3.0)
    for tree in TREES:
        _, decoding = decode(drafter, parse_tree(tree), "greedy", 4)
        assert decoding.stats.acceptance_by_depth == [1.0] * 4


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("tree", TREES)
def test_a_round_does_not_wait(tree: str, rule: str) -> None:
    ids, mask = prompts(LENGTHS[4])
    expansion: Any = "coupled" if rule == "coupled" else "topk"
    for drafter in drafters(plain(rule, 4)).values():
        sampling = sampling_of(rule, 4)
        decoding = decoding_of(tiny("llama"), drafter, tree, sampling, expansion=expansion)
        with torch.no_grad():
            decoding.prefill(ids, mask, 12)
            while not decoding.finished:
                with NoSync():
                    decoding.round()


@pytest.mark.parametrize("tree", [BestFirst(9, 3, 3), Beam(3, 3)], ids=str)
def test_what_cannot_be_grown_is_refused(tree: Any) -> None:
    any_drafter: Any = SimpleNamespace(max_depth=None, independent=False)
    shallow: Any = SimpleNamespace(max_depth=2, independent=False)
    for expansion in ("topk", "coupled"):
        tree.check(any_drafter, expansion)
    for arguments, reason in (
        ((None, "topk"), "needs a drafter"),
        ((shallow, "topk"), "3 deep.*proposes 2"),
        ((any_drafter, "with_replacement"), "biases children drawn with_replacement"),
        ((any_drafter, "without_replacement"), "biases children drawn without_replacement"),
    ):
        with pytest.raises(OptionError, match=reason) as caught:
            tree.check(*arguments)
        one_line(caught.value)


def test_a_frontier_too_narrow_for_the_nodes_is_refused() -> None:
    tree = BestFirst(31, 3, 4)  # 3 + 9 + 9 + 9 candidates when three of a level are extended
    by_level: Any = SimpleNamespace(max_depth=None, independent=False)
    at_once: Any = SimpleNamespace(max_depth=None, independent=True)
    tree.check(by_level)
    for drafter, nodes in itertools.product((by_level, at_once), (32, 120)):
        if drafter is at_once:
            BestFirst(nodes, 3, 4).check(drafter)
            continue
        with pytest.raises(OptionError, match=r"never has more than 31 nodes") as caught:
            BestFirst(nodes, 3, 4).check(drafter)
        one_line(caught.value)
