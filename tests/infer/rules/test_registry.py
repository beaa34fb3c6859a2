"""Which expansion goes with which rule, and who is accepted on trees made by hand and at random."""

import ast
import itertools
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from headstart.heads import OptionError, Sampling, TokenTree, Topology
from headstart.heads.core import gumbel
from headstart.infer.rules.matching import accept_matches, target_choices
from headstart.infer.rules.registry import RULES, choose_rule, find_rule
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.trees.expansions import Expansion
from headstart.train.recipe.schema import Decode
from tests.support.tiny import one_line, path_to, random_parents

EXPANSIONS = sorted(get_args(Expansion))
DRAWN = ("with_replacement", "without_replacement")
LEGAL = {
    ("topk", "greedy"),
    ("coupled", "coupled"),
    ("topk", "typical"),
    *itertools.product(("topk", *DRAWN), ("match", "rejection", "block", "traversal")),
}


PAIRS = list(itertools.product(EXPANSIONS, RULES))


@pytest.mark.parametrize(("expansion", "rule"), PAIRS)
def test_every_pair_is_legal_or_refused_with_the_reason(expansion: str, rule: str) -> None:
    record = RULES[rule]
    assert ((expansion, rule) in LEGAL) != (expansion in record.refuses)
    if (expansion, rule) in LEGAL:
        assert record.check_expansion(expansion) == expansion
        return
    with pytest.raises(OptionError) as caught:
        record.check_expansion(expansion)
    message = one_line(caught.value)
    assert record.refuses[expansion] in message and f"use {record.children!r}" in message


def test_the_records_are_whole() -> None:
    assert set(PAIRS) > LEGAL
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule.check_expansion(None) == rule.children and (rule.children, name) in LEGAL
    kinds = ("samples", "exact", "same_text", "reads_prefix", "chains_only")
    declared = {kind: {name for name in RULES if getattr(RULES[name], kind)} for kind in kinds}
    assert declared == {
        "samples": set(RULES) - {"greedy"},
        "exact": set(RULES) - {"typical"},
        "same_text": {"greedy", "match", "coupled"},
        "reads_prefix": set(RULES) - {"block", "traversal", "typical"},
        "chains_only": {"block"},
    }


def test_unknown_names_are_refused() -> None:
    for named, ask in (
        ("hopeful", lambda: find_rule("hopeful")),
        ("beam", lambda: RULES["greedy"].check_expansion("beam")),
    ):
        with pytest.raises(OptionError, match=f"is '{named}'; expected one of") as caught:
            ask()
        one_line(caught.value)


def test_the_rule_of_a_request() -> None:
    """Without sampling `greedy`, whatever is asked for; when sampling `coupled` by default."""
    assert {choose_rule(name, sampled=False).name for name in (None, *RULES)} == {"greedy"}
    assert choose_rule(None, sampled=True) is find_rule(None) is RULES["coupled"]
    for name in set(RULES) - {"greedy"}:
        assert choose_rule(name, sampled=True) is find_rule(name) is RULES[name]
    with pytest.raises(OptionError, match=r"'greedy' with do_sample=True") as caught:
        choose_rule("greedy", sampled=True)
    one_line(caught.value)


@pytest.mark.parametrize("name", RULES)
def test_a_recipe_takes_the_rules_of_plain_decodings_text(name: str) -> None:
    if RULES[name].same_text:
        assert Decode(rule=name).rule == name
    else:
        with pytest.raises(StrictDataclassFieldValidationError, match="expected one of"):
            Decode(rule=name)


def strings_of(path: Path) -> set[str]:
    """The string constants of a source file, docstrings aside."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone)
    return {node.value for node in constants if isinstance(node.value, str)}


def test_the_product_names_its_rules_in_their_package() -> None:
    """Elsewhere a rule's name is a string in two files at most: code asks the record."""
    root = Path(__file__).parents[3]
    folders = [root / name for name in ("heads", "infer", "train", "headstart")]
    named: dict[str, set[str]] = {name: set() for name in RULES}
    for path in {path.resolve() for folder in folders for path in folder.rglob("*.py")}:
        inside = path.relative_to(root).as_posix()
        if not inside.startswith("infer/rules/"):
            for name in strings_of(path) & set(RULES):
                named[name].add(inside)
    assert {name: files for name, files in named.items() if len(files) > 2} == {}


def test_a_rules_name_in_the_code_is_found(tmp_path: Path) -> None:
    source = tmp_path / "found.py"
    source.write_text('"""greedy"""\n\n\ndef f(rule="match"):\n    """block"""\n    # typical\n')
    assert strings_of(source) == {"match"}


def tree_of(
    parents: list[list[int]], tokens: list[list[int]], valid: list[list[int]] | None = None
) -> TokenTree:
    deepest = max(len(path_to(row, node)) for row in parents for node in range(len(row))) - 1
    shape = Topology.from_parents(torch.tensor(parents), deepest)
    mask = None if valid is None else torch.tensor(valid, dtype=torch.bool)
    return TokenTree(torch.tensor(tokens), shape, mask, torch.full_like(shape.parents, -1))


#        0
#      1   2
#     3 4   5
#            6
PARENTS = [-1, 0, 0, 1, 1, 2, 5]
TOKENS = [9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("choices", "path", "emitted"),
    [
        ([50, 0, 0, 0, 0, 0, 0], [0], [50]),  # nothing agrees
        ([11, 0, 51, 0, 0, 0, 0], [0, 2], [11, 51]),
        ([10, 13, 14, 0, 52, 15, 0], [0, 1, 4], [10, 13, 52]),
        ([11, 13, 14, 0, 0, 15, 53], [0, 2, 5, 6], [11, 14, 15, 53]),
        ([50, 12, 14, 0, 0, 15, 0], [0], [50]),  # agreement below a break does not count
        ([11, 0, 50, 0, 0, 15, 0], [0, 2], [11, 50]),
    ],
)
def test_accept_by_hand(choices: list[int], path: list[int], emitted: list[int]) -> None:
    accepted = accept_matches(tree_of([PARENTS], [TOKENS]), torch.tensor([choices]))
    assert accepted.count.tolist() == [len(path)]
    assert accepted.path[0, : len(path)].tolist() == path
    assert accepted.tokens[0, : len(path)].tolist() == emitted
    assert accepted.path.shape == accepted.tokens.shape == (1, 4)


@pytest.mark.parametrize(
    ("invalid", "length"), [([], 4), ([6], 3), ([5], 2), ([2], 1), ([1, 3, 4], 4), ([2, 5, 6], 1)]
)
def test_invalid_nodes_are_never_accepted(invalid: list[int], length: int) -> None:
    """Choices run 0 2 5 6; an invalid node ends the path even where its token agrees."""
    valid = [int(node not in invalid) for node in range(7)]
    tree = tree_of([PARENTS], [TOKENS], [valid])
    accepted = accept_matches(tree, torch.tensor([[11, 12, 14, 0, 0, 15, 53]]))
    assert accepted.count.tolist() == [length]
    assert accepted.path[0, :length].tolist() == [0, 2, 5, 6][:length]


def longest_by_walk(tree: TokenTree, choices: Tensor, row: int) -> list[int]:
    """The deepest path from the root along which every node is valid and agrees."""
    parents = tree.topology.parents[row].tolist()
    best = [0]
    for node in range(1, len(parents)):
        path = path_to(parents, node)
        agrees = all(
            choices[row, parents[step]] == tree.tokens[row, step]
            and (tree.valid is None or bool(tree.valid[row, step]))
            for step in path[1:]
        )
        if agrees and len(path) > len(best):
            best = path
    return best


@pytest.mark.parametrize("seed", range(20))
def test_accept_against_a_walk(seed: int) -> None:
    """Random trees over three tokens, so that agreement, equal siblings and ties occur."""
    generator = torch.Generator().manual_seed(seed)
    nodes = 4 + seed
    parents = [random_parents(nodes, generator) for _ in range(6)]
    tokens = torch.randint(3, (6, nodes), generator=generator).tolist()
    valid = (torch.rand(6, nodes, generator=generator) < 0.8).int()
    valid[:, 0] = 1
    tree = tree_of(parents, tokens, valid.tolist() if seed % 2 else None)
    choices = torch.randint(3, (6, nodes), generator=generator)
    accepted = accept_matches(tree, choices)
    for row in range(6):
        expected = longest_by_walk(tree, choices, row)
        count = int(accepted.count[row])
        path = accepted.path[row, :count].tolist()
        assert count == len(expected)
        assert torch.equal(tree.tokens[row, path], tree.tokens[row, expected])
        assert torch.equal(accepted.tokens[row, :count], choices[row, path])


def text_of(rows: int, length: int = 6) -> Text:
    ids = torch.zeros(rows, 32, dtype=torch.long)
    ids[:, :length] = torch.randint(1, 8, (rows, length))
    return Text(ids, length)


def test_greedy_choices_are_the_argmax() -> None:
    tree, logits = tree_of([PARENTS], [TOKENS]), torch.randn(1, 7, 64, dtype=torch.float64)
    found = target_choices(Verified(tree, logits, Sampling(), torch.tensor([5]), text_of(1)))
    assert torch.equal(found, logits.argmax(-1))


def test_sampled_choices_use_the_noise_of_the_position_after_the_node() -> None:
    tree = tree_of([PARENTS, PARENTS], [TOKENS, TOKENS])
    logits, seeds = torch.randn(2, 7, 64), torch.tensor([3, 8])
    sampling = Sampling(seeds, LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
    lengths = torch.tensor([5, 9])
    found = target_choices(Verified(tree, logits, sampling, lengths, text_of(2)))
    for row in range(2):
        for node in range(7):
            position = lengths[row] + len(path_to(PARENTS, node))
            noise = gumbel(seeds[row : row + 1], position.view(1, 1), torch.arange(64))[0, 0]
            scores = (logits[row, node] / 0.5).double() + noise
            assert found[row, node] == scores.argmax()


class Spread(LogitsProcessor):
    """A processor that reads the text: it forbids every token that the text holds."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return scores.scatter(1, input_ids, -torch.inf)


@pytest.mark.parametrize("seeds", [None, [5, 6]])
def test_processors_see_each_nodes_own_prefix(seeds: list[int] | None) -> None:
    """Along the walked path, against a walk by hand with the prefix spelt out."""
    tree = tree_of([PARENTS, PARENTS], [TOKENS, TOKENS])
    logits = torch.randn(2, 7, 64)
    logits[0, 0, 11] = logits[0, 2, 14] = logits[0, 5, 15] = 40.0  # the first row goes deep
    logits[0, 6, [9, 11, 14, 15]] = 60.0  # …and would then repeat itself
    # Node 0's token stands in the text already.
    text = text_of(2)
    text.ids[:, 5] = 9
    drawn = None if seeds is None else torch.tensor(seeds)
    sampling = Sampling(drawn, LogitsProcessorList([Spread()]))
    before = text.ids[:, :6].clone()
    found = target_choices(Verified(tree, logits, sampling, torch.tensor([5, 5]), text))
    for row in range(2):
        node, prefix, step = 0, before[row].tolist(), 0
        while True:
            scores = Spread()(torch.tensor([prefix]), logits[row, node][None]).double()[0]
            if seeds is not None:
                seed, at = torch.tensor(seeds[row : row + 1]), torch.tensor([[6 + step]])
                scores = scores + gumbel(seed, at, torch.arange(64))[0, 0]
            token = int(scores.argmax())
            assert found[row, node] == token and token not in prefix
            children = [n for n in range(7) if PARENTS[n] == node and TOKENS[n] == token]
            if not children:
                break
            node, step = children[0], step + 1
            prefix.append(token)
        if row == 0:
            assert node == 6
    assert torch.equal(text.ids[:, :6], before)


def test_rows_of_different_length_are_processed_apart() -> None:
    class Last(LogitsProcessor):
        """Adds the row's last token and its length, so that a wrong prefix shows."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return scores + input_ids[:, -1:] + 100 * input_ids.shape[1]

    ids = torch.arange(24).view(3, 8)
    text = Text(ids, 3)
    text.lengths = torch.tensor([3, 5, 3])
    text.host_lengths = np.array([3, 5, 3])
    sampling = Sampling(None, LogitsProcessorList([Last()]))
    found = text.process(sampling, 1, torch.zeros(3, 2))
    assert found.tolist() == [[403.0] * 2, [613.0] * 2, [419.0] * 2]
