"""Several drafters, each with its own part of one tree: what they are shown, and what is kept."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.heads import DrafterGroup, OptionError, Step
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Speculator, Union, load, parse_tree
from headstart.infer.measure.planner import make_plan
from headstart.infer.rules import matching as choices
from headstart.infer.trees.children import Children
from headstart.infer.trees.policy import Committed
from tests.support.scripted import Cached, make, rows_of
from tests.support.tiny import one_line, prompts, tiny

LENGTHS, NEW = [9, 4, 7], 24
DRAWN = {"expansion": "without_replacement"}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.8, "seed": [5, 6, 7]}


def decode(speculator: Speculator, **options: Any) -> Any:
    ids, mask = prompts(LENGTHS)
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return speculator.generate(ids, attention_mask=mask, **given | options)


def plain(**options: Any) -> Any:
    return decode(Speculator(tiny("llama")), **options)


def several(*shapes: str, mode: str = "sometimes", text: Any = None) -> DrafterGroup:
    """Scripted drafters of a text, greedy when None; those with a cache then check the loop."""
    (ids, mask), rows = prompts(LENGTHS), None
    if text is None:
        text, rows = plain(), rows_of(ids, mask)
    new = text[:, ids.shape[1] :]
    return DrafterGroup([make(shape, tiny("llama"), new, mode, prompts=rows) for shape in shapes])


PARTS = {"heads": "[[0],[1],[0,0]]", "cached": "cartesian:2,2", "lookup": "best-first:5,3,3"}


@pytest.mark.parametrize(
    "shapes",
    [("heads", "cached"), ("cached", "heads"), ("lookup", "cached", "heads", "cached")],
    ids="-".join,
)
def test_each_is_shown_its_own(shapes: tuple[str, ...]) -> None:
    """Layers and text: drafters with a cache compare both with a forward of the whole text."""
    drafter = several(*shapes)
    speculator = Speculator(tiny("llama"), drafter, tree="+".join(PARTS[shape] for shape in shapes))
    assert torch.equal(decode(speculator), plain())
    assert speculator.stats.tau > 1.5
    checked = [each.checks for each in drafter.drafters if isinstance(each, Cached)]
    assert min(checked) > 5


def test_what_stands_below_a_duplicate_sibling_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walked level by level as by all nodes at once; scores are those of plain decoding."""
    wanted = {"return_dict_in_generate": True, "output_scores": True} | SAMPLED
    drafter = several("heads", "cached", mode="always", text=plain(**SAMPLED))
    speculator = Speculator(tiny("llama"), drafter, tree="chain:1+chain:4", rule="match")
    expected: Any = plain(**wanted)
    for at_once in (choices._AT_ONCE, 0):
        monkeypatch.setattr(choices, "_AT_ONCE", at_once)
        found: Any = decode(speculator, **wanted)
        assert torch.equal(found.sequences, expected.sequences)
        assert (speculator.stats.counts[:-1] == 5).all() and speculator.stats.rounds > 9
        for mine, own in zip(found.scores, expected.scores, strict=True):
            assert torch.allclose(mine, own, atol=1e-5)


def fixed(*tokens: int) -> Any:
    """A drafter of the same candidates everywhere."""
    step = Step(ids=torch.tensor([[tokens]]))
    return SimpleNamespace(
        independent=False, max_depth=None, begin=lambda *_: step, extend=lambda *_: step
    )


def test_nodes_that_a_part_lacks_count_for_nothing() -> None:
    """They hang on the root; the ranks of the next part's children must not pass their bound."""
    drafter: Any = SimpleNamespace(members=[fixed(-1, -1), fixed(7, -1), fixed(8, 9)])
    one = torch.ones(1, 1).long()
    committed = Committed(torch.zeros(1, 1, 0), one, one[0], one[0])
    tree = parse_tree("best-first:4,1,3+beam:2,1+cartesian:2").grow(
        drafter, None, committed, Children()
    )
    shape, valid = tree.topology, tree.valid
    assert (
        valid is not None and valid.tolist()[0] == [True] + [False] * 3 + [True, False] + [True] * 2
    )
    assert tree.tokens[valid].tolist() == [1, 7, 8, 9]
    assert shape.parents.tolist()[0] == [-1] + [0] * 7
    assert shape.rank[valid].tolist() == [0, 0, 1, 2] and shape.width == 5


def test_broken_proposals_of_one_are_seen() -> None:
    drafter = several("heads", "cached")
    expected, broken = plain(), drafter.drafters[1]
    step = Step(torch.full((len(LENGTHS), 1, tiny("llama").config.vocab_size), torch.nan))
    object.__setattr__(broken, "begin", lambda *_: step)
    speculator = Speculator(tiny("llama"), drafter, tree="chain:3+chain:1")
    with pytest.warns(RuntimeWarning, match="proposed NaN"):
        assert torch.equal(decode(speculator), expected)


def medusa(**options: Any) -> Medusa:
    config = MedusaConfig.for_target(tiny("llama"), heads=2, **options)
    return Medusa(config).double().bind(tiny("llama")).eval()


def test_each_has_its_own_tree_where_none_is_given() -> None:
    cached: Any = several("heads", "cached").drafters[1]
    speculator = Speculator(tiny("llama"), [medusa(), cached])
    assert str(speculator.tree) == "chain:2+chain:4"
    alone = load(tiny("llama"), ["lookup"])
    assert str(alone.tree) == "chain:4" and not isinstance(alone.drafter, DrafterGroup)
    both = load(tiny("llama"), [medusa(), "lookup"], tree="[[0],[1]]+beam:2,3")
    assert isinstance(both.tree, Union) and both.tree.nodes == 9
    assert torch.equal(decode(both), plain())


@pytest.mark.parametrize(
    ("count", "options", "reason"),
    [
        (2, {"tree": "chain:2"}, "grown by one drafter, found 2"),
        (1, {"tree": "chain:2+chain:2"}, "2 parts, found 1"),
        (0, {"tree": "chain:2+chain:2"}, "2 parts, found no"),
        (2, {"tree": "chain:2+plain"}, "is no union"),
        (2, {"tree": "chain:2+chain:3"}, "chain:3 is 3 deep"),
        (2, {"tree": "chain:2+chains:2"}, "'chains:2'; expected"),
        (2, {"tree": "chain:2+best-first:4,2,2", "rule": "rejection", **DRAWN}, "biases"),
        (2, {"tree": "chain:2+[[1]]", "rule": "traversal", **DRAWN}, "biases"),
        (2, {"tree": "chain:2+chain:2", "rule": "block"}, "takes a chain"),
    ],
)
def test_what_is_refused(count: int, options: dict, reason: str) -> None:
    with pytest.raises(OptionError) as error:
        Speculator(tiny("llama"), [medusa() for _ in range(count)], **options)
    assert reason in one_line(error.value)


def test_several_are_neither_one_nor_planned_as_one() -> None:
    pair = DrafterGroup([medusa(), medusa()])
    with pytest.raises(OptionError, match="DrafterGroup among the drafters"):
        DrafterGroup([pair, medusa()])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="plan each alone"):
        make_plan(tiny("llama"), pair, [torch.ones(3).long()])
