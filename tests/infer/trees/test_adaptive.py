"""Adaptive trees: the levels that rounds grow, their text form, and what is refused."""

import pytest

from headstart.heads import OptionError
from headstart.infer import Speculator, parse_tree, speculator
from headstart.infer.trees.shapes import check_grown_by
from headstart.infer.trees.texts import read_tree
from tests.support.families import drafter, target


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("chain:1", ["plain", "chain:1"]),
        ("chain:4", ["plain", "chain:1", "chain:2", "chain:4"]),
        ("chain:16", ["plain", "chain:2", "chain:4", "chain:8", "chain:16"]),
        ("[[1],[0,1],[0,0,0]]", ["plain", "cartesian:2", None]),
        ("best-first:16,2,4", ["plain", "best-first:3,2,1", "best-first:7,2,2", None]),
        ("best-first:32,4,5,8", ["plain", "best-first:5,4,1,8", "best-first:21,4,2,8", None]),
        ("beam:3,4", ["plain", "beam:3,1,4", "beam:3,2,7", None]),
        ("beam:3,4,6", ["plain", "beam:3,1,4", "beam:3,2,6", None]),
        (
            "chain:4+cartesian:2,1",
            ["plain", "chain:1+cartesian:2", "chain:2+cartesian:2,1", None],
        ),
    ],
)  # fmt: skip
def test_levels(text: str, levels: list[str | None]) -> None:
    tree = parse_tree(f"adaptive:{text}")
    found = [str(level) for level in tree.levels]  # type: ignore[attr-defined]
    assert found == [text if each is None else each for each in levels]
    whole = parse_tree(text)
    assert str(tree) == f"adaptive:{whole}" and tree.first_nodes == whole.first_nodes
    assert (tree.nodes, tree.max_depth) == (whole.nodes, whole.max_depth)
    assert tree.in_place == whole.in_place
    shape = read_tree(str(tree))
    assert (str(shape), shape.nodes, shape.max_depth) == (str(tree), tree.nodes, tree.max_depth)


@pytest.mark.parametrize("text", ["adaptive:plain", "adaptive:adaptive:chain:2"])
def test_nothing_to_adapt(text: str) -> None:
    with pytest.raises(OptionError, match="has no depth to adapt"):
        read_tree(text)


def test_a_part_of_a_union_is_not_adapted_alone() -> None:
    with pytest.raises(OptionError, match="write adaptive: once, before the first part"):
        read_tree("chain:2+adaptive:chain:2")
    check_grown_by(read_tree("adaptive:chain:2+chain:3"), [2, 3])
    with pytest.raises(OptionError, match="is 3 deep, but the drafter proposes 2 tokens"):
        check_grown_by(read_tree("adaptive:chain:3"), [2])


def test_processes_that_each_decode_choose_no_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forwards wait for each other, so all of them must verify the same tree."""
    monkeypatch.setattr(speculator, "in_parts", lambda model: True)
    with pytest.raises(OptionError, match="each would choose depths by its own clock"):
        Speculator(target("tiny"), drafter("medusa", "tiny"), tree="adaptive:chain:3")


@pytest.mark.parametrize("rule", ["rejection", "traversal", "block", "typical"])
def test_rules_whose_text_depends_on_the_tree_are_refused(rule: str) -> None:
    with pytest.raises(OptionError, match="so a seed would not give it again"):
        Speculator(target("tiny"), drafter("medusa", "tiny"), tree="adaptive:chain:3", rule=rule)
