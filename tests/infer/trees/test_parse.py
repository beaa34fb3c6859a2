"""How trees are written: every text form is read, and every tree writes one that reads back."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import OptionError
from headstart.infer import Beam, BestFirst, Policy, StaticTree, Union, parse_static, parse_tree
from headstart.infer.measure.ranks import best_tree
from headstart.infer.trees.texts import read_tree, sparse_nodes
from tests.support.tiny import one_line

SPARSE = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1, 0]]
FORMS = {
    "plain": (1, 0),
    "chain:3": (4, 3),
    "cartesian:3,2": (10, 2),
    "cartesian:1,2": (4, 2),
    "[[1],[0,0]]": (4, 2),
    "best-first:9,3,4": (9, 4),
    "best-first:9,3,4,2": (9, 4),
    "beam:3,4": (13, 4),
    "beam:3,4,9": (9, 4),
    "chain:2+[[1]]+beam:2,2": (8, 2),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text: str) -> None:
    tree = parse_tree(text)
    assert (tree.nodes, tree.max_depth) == FORMS[text]
    assert str(tree) == text and parse_tree(tree) is tree
    shape = read_tree(text)  # without torch
    assert (shape.nodes, shape.max_depth) == FORMS[text]
    assert tree.in_place == (text in ("chain:3", "plain"))


def shape_of(tree: Policy) -> Any:
    """What makes two trees equal: their kind and everything that decides how they grow."""
    if isinstance(tree, Union):
        return [shape_of(part) for part in tree.parts]
    if isinstance(tree, StaticTree):
        return tree.paths
    numbers = {name: value for name, value in vars(tree).items() if not name.startswith("_")}
    return type(tree), numbers


def random_paths(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    depths = torch.randint(1, 5, (6,), generator=generator).tolist()
    return [torch.randint(0, 3, (depth,), generator=generator).tolist() for depth in depths]


def measured_tree() -> StaticTree:
    """As training chooses `sparse:8`: the best tree for ranks [prompts, depth]."""
    ranks = torch.randint(0, 4, (40, 3), generator=torch.Generator().manual_seed(1))
    return StaticTree(best_tree([ranks], 8))


TREES: list[Policy] = [
    *(parse_tree(text) for text in FORMS),
    *(StaticTree(random_paths(seed)) for seed in range(12)),
    *(StaticTree(paths) for paths in (SPARSE, [[3]], [[0], [2]], [[0, 0], [1, 1]], [[0], [1, 0]])),
    measured_tree(),
    StaticTree.chain(0),
    StaticTree.chain(1),
    StaticTree.cartesian([4]),
    BestFirst(31, 4, 4),
    BestFirst(6, 2, 4, 1),
    Beam(3, 4, 13),
    Union([StaticTree(SPARSE), BestFirst(5, 2, 2)]),
    Union([measured_tree(), StaticTree.cartesian([2, 2]), Beam(2, 2, 4)]),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_text_of_a_tree_reads_back(tree: Policy) -> None:
    again = parse_tree(str(tree))
    assert type(again) is type(tree) and shape_of(again) == shape_of(tree)
    assert str(again) == str(tree) and again.label == tree.label


def test_labels_are_short() -> None:
    for text in ("plain", "chain:3", "cartesian:2,1", "best-first:9,3,4", "beam:3,4"):
        assert parse_tree(text).label == text
    assert StaticTree(SPARSE).label == "sparse 2/3/2/1"
    assert parse_tree("chain:2+[[1]]").label == "chain:2+sparse 1"


def test_a_tree_that_is_measured_is_no_tree_yet() -> None:
    """`sparse:N` names what training measures; its error says what to give instead."""
    with pytest.raises(OptionError, match=r"'sparse:8' is chosen .*tree\.json") as caught:
        parse_tree("sparse:8")
    one_line(caught.value)


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
def test_static_forms(text: Any, paths: list[list[int]]) -> None:
    tree = parse_static(text)
    assert [list(path) for path in tree.paths] == paths
    assert tree.nodes == len(paths) + 1
    assert tree.max_depth == max(map(len, paths), default=0)
    assert parse_static(tree.paths).parents == tree.parents


def test_a_searched_tree_is_not_static() -> None:
    for text in ("beam:2,2", "chain:2+chain:2"):
        with pytest.raises(
            OptionError, match=f"tree is {text.replace('+', '.')}; expected plain"
        ) as caught:
            parse_static(text)
        one_line(caught.value)


def test_a_file_of_paths(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(SPARSE))
    assert parse_static(str(file)).paths == StaticTree(SPARSE).paths
    assert parse_tree(f"chain:2+{file}").nodes == 11


@pytest.mark.parametrize(
    "text",
    [
        "bush:3",
        "chain:",
        "chain:three",
        "chain:-2",
        "chain:0",
        "chain:2,3",
        "cartesian:2,x",
        "cartesian:2,0",
        "cartesian:-1",
        "",
        "sparse:",
        "sparse:1",
        "sparse:2/1",
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
        "best-first",
        "best-first:",
        "best-first:9",
        "best-first:9,3",
        "best-first:9,3,x",
        "best-first:9,3,4,2,1",
        "best-first:1,3,4",
        "best-first:9,0,4",
        "best-first:9,3,-4",
        "best-first:99,3,2",
        "best-first:4,3,4",
        "best-first:9,3,4,-1",
        "beam:",
        "beam:3",
        "beam:0,4",
        "beam:3,0",
        "beam:3,4,14",
        "beam:3,4,1",
        "beam:3,4,4",
        "beam:3,4,5,6",
        "beams:3,4",
    ],
    ids=repr,
)
def test_bad_forms_are_one_line(text: Any) -> None:
    with pytest.raises(OptionError, match=r"^(a )?tree") as caught:
        parse_tree(text)
    one_line(caught.value)


@pytest.mark.parametrize(("text", "least"), [("best-first:{},3,4", 5), ("beam:3,4,{}", 5)])
def test_a_searched_tree_has_a_node_for_each_level(text: str, least: int) -> None:
    assert parse_tree(text.format(least)).nodes == least
    with pytest.raises(OptionError, match="3 nodes beside the root, and a depth of 4; expected"):
        parse_tree(text.format(least - 1))


@pytest.mark.parametrize(
    "text",
    [
        "chain:1000000",
        "chain:257",
        "cartesian:1000,1000,1000",
        "cartesian:64,64",
        "cartesian:" + "1," * 5000 + "1",
        "best-first:1000000,5000,5",
        "best-first:5000,5,5",
        "best-first:9,3,1000000000",
        "best-first:9,1000000,4",
        "best-first:4096,4096,256,4096",
        "beam:1000000,1000000",
        "beam:2,1000000,3",
        "beam:3000,2,9",
        "sparse:1000000",
        "+".join(["chain:200"] * 25),
        json.dumps([[0] * 257]),
        json.dumps([[5000]]),
        json.dumps([[10**1000]]),
        json.dumps([[0]] * 5000),
        json.dumps([[rank] + [0] * 200 for rank in range(25)]),
        "[" * 100_000,
        "chain:" + "9" * 5000,
    ],
    ids=lambda text: text[:30],
)
def test_what_is_too_large_is_refused_at_once(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(OptionError, match=r"^(a )?tree") as caught:
        parse_static(text) if not text.startswith("sparse") else sparse_nodes(text)
    assert time.perf_counter() - started < 0.5
    assert len(one_line(caught.value)) < 500


def test_the_largest_trees() -> None:
    assert parse_static("chain:256").nodes == 257
    assert parse_static("cartesian:63,63").nodes == 1 + 63 + 63 * 63
    assert parse_static([[4095]]).width == 1
    assert parse_tree("best-first:4096,16,16").nodes == 4096


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"a": \n [', "", "\x00", "5"])
def test_a_file_that_holds_no_tree(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "x.json").write_text(text)
    with pytest.raises(OptionError, match=r"x\.json") as caught:
        parse_tree(str(file))
    one_line(caught.value)


def test_a_file_too_large_for_a_tree(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with file.open("wb") as out:
        out.truncate(2**33)  # takes no space on the disk
    with pytest.raises(OptionError, match="larger than any tree"):
        parse_tree(str(file))


def test_an_unknown_form_lists_them_all() -> None:
    with pytest.raises(OptionError) as caught:
        parse_tree("bush:3")
    for form in ("plain", "chain", "cartesian", "JSON", "best-first", "beam"):
        assert form in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text('{"a": \n [')
    with pytest.raises(OptionError, match=r"tree\.json") as caught:
        parse_static(str(file))
    one_line(caught.value)
