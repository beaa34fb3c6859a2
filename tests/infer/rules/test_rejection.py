"""The rule `rejection`: its decisions pinned by hand, and whole trees against a plain walker."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from headstart.heads import Sampling, TokenTree, Topology
from headstart.heads.core import draw
from headstart.infer.rules import rejection as module
from headstart.infer.rules import siblings
from headstart.infer.rules.rejection import rejection
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.rules.siblings import (
    accept_probability,
    accepts,
    residual,
    verdicts,
    without,
)
from tests.support.walker import (
    KINDS,
    NAN,
    TEXT,
    VOCAB,
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

ONE = torch.ones(1, dtype=torch.float64)


class Spread(LogitsProcessor):
    """A processor that reads the text: tokens that it holds become less likely."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        less = torch.full_like(input_ids, -1, dtype=scores.dtype)
        return scores.scatter_add(1, input_ids, less)


def test_accepting_by_hand() -> None:
    p_x, q_x = vectors([0.3, 0.3, 0.3, 0.0, 0.0, NAN])[0], vectors([0.6, 0.2, 0, 0, 0.4, 0.5])[0]
    plain = accept_probability(p_x, q_x)
    assert plain[:5].tolist() == [0.5, 1, 0, 0, 0] and plain[5].isnan()
    half = accept_probability(p_x, q_x, torch.full_like(p_x, 0.5))
    assert torch.allclose(half[:5], vectors([0.25, 0.75, 0, 0, 0])[0]) and half[5].isnan()


def test_the_residual_by_hand() -> None:
    """(0.5, 0.3, 0.2) − (0.1, 0.6, 0.3) leaves 0.4 of token 0; half of p leaves 0.15 of it."""
    p, q = vectors([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]), vectors([0.1, 0.6, 0.3], [0.0, 0.2, 0.8])
    left, weight = residual(p, q, vectors([1, 1])[0])
    assert torch.allclose(left, vectors([1, 0, 0], [0.5 / 0.6, 0.1 / 0.6, 0]))
    assert weight.tolist() == [1, 1]
    left, weight = residual(p, q, torch.tensor([0.5, 0.8]).double())
    assert torch.allclose(left, vectors([1, 0, 0], [0.4 / 0.44, 0.04 / 0.44, 0]))
    assert torch.allclose(weight, vectors([0.15 / 0.65, 0.44 / 0.64])[0])


def test_a_residual_without_mass_keeps_p_and_accepts_no_more() -> None:
    p = vectors([0.5, 0.5], [0.5, 0.5], [NAN, NAN])
    left, weight = residual(
        p, vectors([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]), vectors([1, 0.3, 0.3])[0]
    )
    assert left[:2].tolist() == p[:2].tolist() and left[2].isnan().all()
    assert weight.tolist() == [1, 0, 0.3]


def test_nan_is_never_hidden() -> None:
    p, q = vectors([NAN, 0.5, 0.5]), vectors([0.2, 0.3, 0.5])
    assert residual(p, q, ONE)[0].isnan().all() and residual(q, p, ONE)[0].isnan().all()
    assert without(p, torch.tensor([1])).isnan()[0, 0]


def test_a_uniform_below_the_probability_accepts() -> None:
    uniforms, half = vectors([0.1, 0.9])[0], vectors([0.5, 0.5])[0]
    assert accepts(uniforms, half).tolist() == [True, False]
    assert accepts(uniforms, half * NAN).tolist() == [False, False]


def test_draw_by_hand() -> None:
    p = vectors([0.0, 0.25, 0.0, 0.75, 0.0], [0, 0, 0, 0, 0], [0.5, NAN, 0.5, 0, 0])
    uniforms = vectors([0.0, 0.2499, 0.25, 1.0]).expand(3, -1)
    assert draw(p, uniforms).tolist() == [[1, 1, 3, 3], [-1] * 4, [-1] * 4]
    assert draw(p[1:2] + torch.inf, uniforms[:1]).tolist() == [[-1] * 4]


def test_draw_never_takes_what_has_no_probability() -> None:
    """Float32 sums of many small numbers would miss; uniforms at both ends are the hard ones."""
    p = torch.rand(50, 1000).pow(8)
    p[torch.rand(50, 1000) < 0.5] = 0
    p[:, [0, -1]] = 0
    ends = torch.tensor([1e-300, 1e-16, 1 - 2.0**-53, 1 - 1e-12], dtype=torch.float64)
    assert (p.gather(1, draw(p, ends.expand(50, -1))) > 0).all()


def chain(p: Tensor, q: Tensor | None, uniforms: list[float], **options: Any) -> Any:
    """What rejection answers on a root with children 0, 1, … (every one drawn from q)."""
    kids = len(uniforms) - 2
    shape = Topology.from_parents(torch.tensor([[-1, *[0] * kids]]), 1)
    proposal_row = torch.full_like(shape.parents, -1 if q is None else 0)
    given = None if q is None else q.log().unsqueeze(1)
    tokens = torch.arange(-1, kids).clamp(min=0).unsqueeze(0)
    tree = TokenTree(tokens, shape, None, proposal_row, given, **options)

    class Fixed(Sampling):
        def uniforms(self, positions: Tensor, draws: int, stream: Any) -> Tensor:
            return vectors(uniforms).unsqueeze(1)

    logits = p.log().unsqueeze(1).expand(-1, kids + 1, -1)
    sampling = Fixed(torch.tensor([0]), None, torch.float64)
    text = Text(torch.zeros(1, 8, dtype=torch.long), 1)
    return answers(rejection(Verified(tree, logits, sampling, torch.tensor([0]), text)))[0]


P, Q = vectors([0.3, 0.3, 0.4]), vectors([0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("q", "options", "uniforms", "expected"),
    [
        # Token 0 is accepted below 0.3 / 0.6; after it the last token comes from its own p.
        (Q, {}, [0, 0.49, 0, 0.59], ([0, 1], [0, 1])),
        (Q, {}, [0, 0.49, 0, 0.61], ([0, 1], [0, 2])),
        # Then p is (0, 0, 1): token 1 has no chance, drawn again from q or from what q has left.
        (Q, {}, [0, 0.51, 1e-9, 0.01], ([0], [2])),
        (Q, {"replacement": True}, [0, 0.51, 1e-9, 0.01], ([0], [2])),
        # Point masses: accepted with p(x), else struck from p; then 0.3 / 0.7 = 0.4286 for token 1.
        (None, {}, [0, 0.29, 0, 0.31], ([0, 1], [0, 1])),
        (None, {}, [0, 0.31, 0.428, 0.9], ([0, 2], [1, 2])),
        (None, {}, [0, 0.31, 0.429, 0.001], ([0], [2])),
    ],
)
def test_one_level_by_hand(q: Any, options: Any, uniforms: Any, expected: Any) -> None:
    assert chain(P, q, uniforms, **options) == expected


def test_the_second_child_is_judged_by_what_q_has_left() -> None:
    """p − q = (−.4, .1, .3), so p becomes (0, .25, .75), and q (0, .5, .5), or itself if put back.

    Child 1 is then accepted with .25 / .5, or with .25 / .25.
    """
    p, q = vectors([0.1, 0.35, 0.55]), vectors([0.5, 0.25, 0.25])
    for uniform, without_, with_ in ((0.49, [0, 2], [0, 2]), (0.51, [0], [0, 2])):
        drawn = [0, 0.21, uniform, 0.5]
        assert chain(p, q, drawn)[0] == without_
        assert chain(p, q, drawn, replacement=True)[0] == with_


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [None, WARPERS, LogitsProcessorList([Spread()])])
def test_rejection_against_the_walker(kind: str, processors: Any) -> None:
    agrees_with_the_walker(rejection, kind, processors)


def test_the_walker_notices_a_wrong_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: q that keeps its drawn token, and one uniform for all nodes."""
    for owner, name, wrong in (
        (siblings, "without", lambda q, token: q),
        (module, "verdicts", lambda verified: 0 * verdicts(verified) + verdicts(verified)[:, :1]),
    ):
        generator = torch.Generator().manual_seed(4)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            verified = verified_of(random_tree("without", 600, 9, generator), generator)
            found = answers(rejection(verified))
        assert found != [Walker(verified, row).rejection() for row in range(600)], name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_judged_as_if_alone(kind: str) -> None:
    judges_rows_as_if_alone(rejection, kind)


def test_the_walk_stops_at_an_end_token() -> None:
    """What follows an accepted end token is cut by the loop; what leads to it is not changed."""
    generator, stopped = torch.Generator().manual_seed(6), 0
    ends = torch.arange(VOCAB) < 2
    for _ in range(10):
        tree = random_tree("points", 8, 12, generator)
        tree.tokens[:, 0] = 5
        verified = verified_of(tree, generator, ends=ends)
        for row, (path, tokens) in enumerate(answers(rejection(verified))):
            expected_path, expected = Walker(verified, row).rejection(lambda token: token < 2)
            assert path == expected_path and tokens[: len(expected)] == expected
            stopped += len(expected) < len(path)
    assert stopped > 5


def test_scores_that_are_no_distribution_show_as_minus_one() -> None:
    generator = torch.Generator().manual_seed(7)
    verified = verified_of(random_tree("without", 3, 9, generator), generator)
    verified.logits[1] = NAN
    verified.logits[2] = -torch.inf
    found = answers(rejection(verified))
    assert found[0] == Walker(verified, 0).rejection()
    assert found[1:] == [([0], [-1])] * 2


def test_a_drafter_of_nan_is_only_never_accepted() -> None:
    never_accepts_a_drafter_of_nan(rejection)


def test_float32_decides_alike() -> None:
    """The dtype of `Sampling` is that of the decisions; here no decision is a near-tie."""
    generator = torch.Generator().manual_seed(9)
    verified = verified_of(random_tree("without", 32, 9, generator), generator)
    wide = answers(rejection(verified))
    verified.sampling = Sampling(verified.sampling.seeds)
    assert verified.sampling.dtype == torch.float32 and answers(rejection(verified)) == wide


def test_texts_are_written_along_the_path() -> None:
    """A processor that reads the text was shown each node's prefix; the text ahead stays whole."""
    generator = torch.Generator().manual_seed(10)
    processors = LogitsProcessorList([Spread()])
    verified = verified_of(random_tree("points", 8, 12, generator), generator, processors)
    before = verified.text.ids[:, :TEXT].clone()
    for row, (_, tokens) in enumerate(answers(rejection(verified))):
        written = verified.text.ids[row, TEXT:][: len(tokens) - 1]
        assert written.tolist() == tokens[:-1]
    assert torch.equal(verified.text.ids[:, :TEXT], before)
