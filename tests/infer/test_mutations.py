"""The mutation gate: bugs that others have shipped, each seen by the enumeration of test_exactness.

Every bug is put into the product from here, by replacing a function (or one method) of it; the true
code passes on the very same cases. A bug is listed with every rule in which it can do harm.
Some do none: `draw` divides by the total, so a residual that is not renormalised is right on a
chain under `rejection`, and nodes that share their children's draws are right under `rejection`,
which never looks at a node's children before the verdict on its sibling is settled; both are shown.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import Sampling, TokenTree
from headstart.infer import StaticTree, Union
from headstart.infer.rules import siblings
from headstart.infer.rules.registry import RULES
from headstart.infer.rules.rule_api import Accepted, Verified
from headstart.infer.trees import children, static
from headstart.infer.trees.expansions import SAMPLED
from tests.support.rounds import EXACT, SMALL, round_of

KILLED = 1e-6

Patch = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Patch] = {}


def bug(patch: Callable[[pytest.MonkeyPatch], None]) -> Patch:
    """Register a bug under its function's name."""
    BUGS[patch.__name__.replace("_", " ")] = patch
    return patch


def everywhere(patch: pytest.MonkeyPatch, name: str, new: Callable[..., Any]) -> None:
    """Replace a function of the sampling rules in every file that calls it."""
    for module, found in list(sys.modules.items()):
        if module.startswith("headstart.infer.rules.") and hasattr(found, name):
            patch.setattr(found, name, new)


@bug
def uniforms_reused_across_nodes(patch: pytest.MonkeyPatch) -> None:
    true = siblings.verdicts

    def verdicts(verified: Verified) -> Tensor:
        uniforms = true(verified)
        return torch.cat([uniforms[:, :1].expand_as(uniforms[:, 1:]), uniforms[:, -1:]], dim=1)

    everywhere(patch, "verdicts", verdicts)


@bug
def verdict_reused_for_the_last_token(patch: pytest.MonkeyPatch) -> None:
    true = siblings.verdicts

    def verdicts(verified: Verified) -> Tensor:
        uniforms = true(verified)
        return torch.cat([uniforms[:, :-1], uniforms[:, 1:2]], dim=1)

    everywhere(patch, "verdicts", verdicts)


@bug
def childrens_draws_reused_across_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(children, "place", lambda positions, nodes: positions + 0 * nodes)


@bug
def wrong_target_row(patch: pytest.MonkeyPatch) -> None:
    true = Verified.scores_at

    def scores_at(self: Verified, node: Tensor, level: int, alive: Tensor) -> Tensor | None:
        return true(self, self.tree.topology.parent_or_root.gather(1, node), level, alive)

    patch.setattr(Verified, "scores_at", scores_at)


@bug
def wrong_bonus_row(patch: pytest.MonkeyPatch) -> None:
    """The row that a round asks for last, to draw its last token from, is the parent's."""
    true, asked = Verified.scores_at, []

    def scores_at(self: Verified, node: Tensor, level: int, alive: Tensor) -> Tensor | None:
        shape = self.tree.topology
        asked[:] = [*(one for one in asked if one is self), self]
        branching = len(set(shape.parents[0].tolist()) - {-1})
        walks = sys._getframe(1).f_code.co_name == "rejection"
        if len(asked) == (shape.max_depth if walks else branching) + 1:
            node = shape.parent_or_root.gather(1, node)
        return true(self, node, level, alive)

    patch.setattr(Verified, "scores_at", scores_at)


@bug
def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    true = siblings.normalise

    def normalise(excess: Tensor, p: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
        left, new = true(excess.clone(), p, weight)
        return torch.where(excess.sum(1, keepdim=True) > 0, excess, left), new

    everywhere(patch, "normalise", normalise)


@bug
def residual_softmaxed(patch: pytest.MonkeyPatch) -> None:
    true = siblings.normalise

    def normalise(excess: Tensor, p: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
        left, new = true(excess, p, weight)
        return left.softmax(-1), new

    everywhere(patch, "normalise", normalise)


@bug
def verified_with_another_q(patch: pytest.MonkeyPatch) -> None:
    """The rule forgets the temperature that the children were drawn at."""
    true = siblings.proposal

    def proposal(verified: Verified, node: Tensor) -> Tensor | None:
        warm = replace(verified, sampling=replace(verified.sampling, processors=None))
        return true(warm, node)

    everywhere(patch, "proposal", proposal)


@bug
def target_unprocessed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sampling, "process_each", lambda self, logits, before: logits.to(self.dtype))


@bug
def residual_of_replacement_used_without(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, "without", lambda q, token: q)


@bug
def siblings_resorted(patch: pytest.MonkeyPatch) -> None:
    """The likeliest drawn child stands first, and so on; all of them are the root's."""

    def change(tree: TokenTree) -> TokenTree:
        likely = drawn_logits(tree)
        if tree.valid is not None:
            likely = likely.masked_fill(~tree.valid, -torch.inf)
        order = likely[:, 1:].argsort(dim=1, descending=True, stable=True) + 1
        order = torch.nn.functional.pad(order, (1, 0))
        valid = None if tree.valid is None else tree.valid.gather(1, order)
        return replace(tree, tokens=tree.tokens.gather(1, order), valid=valid)

    changed_afterwards(patch, change)


def drawn_logits(tree: TokenTree) -> Tensor:
    """[B, N] what the drafter gave each node's token; 0 for the root."""
    assert tree.logits is not None and tree.vocabulary is None
    rows = tree.proposal_row.clamp(min=0).unsqueeze(-1).expand(-1, -1, tree.logits.shape[-1])
    log_q = tree.logits.log_softmax(-1).gather(1, rows)  # [B, N, V]
    found = log_q.gather(2, tree.tokens.unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(tree.proposal_row < 0, 0)


def changed_afterwards(
    patch: pytest.MonkeyPatch, change: Callable[[TokenTree], TokenTree], policy: Any = StaticTree
) -> None:
    """Grow as before, then change the tree."""
    true = policy.grow
    patch.setattr(policy, "grow", lambda self, *args: change(true(self, *args)))


def dropping(
    patch: pytest.MonkeyPatch, drop: Callable[[TokenTree], Tensor], policy: Any = StaticTree
) -> None:
    """Grow as before, then take nodes [B, N] out, with all below them."""

    def change(tree: TokenTree) -> TokenTree:
        keep = ~drop(tree)
        keep[:, 0] = True
        if tree.valid is not None:
            keep = keep & tree.valid
        paths = tree.topology.paths
        return replace(tree, valid=keep.gather(1, paths.flatten(1)).view(paths.shape).all(-1))

    changed_afterwards(patch, change, policy)


@bug
def drawn_child_pruned(patch: pytest.MonkeyPatch) -> None:
    """Children that the drafter itself thinks unlikely are dropped after they were drawn."""
    dropping(patch, lambda tree: drawn_logits(tree).exp() < 0.2)


@bug
def drawn_children_reranked(patch: pytest.MonkeyPatch) -> None:
    """Of all drawn nodes the half with the most probable paths is kept, as EAGLE-2 does."""

    def drop(tree: TokenTree) -> Tensor:
        path = (tree.topology.ancestors * drawn_logits(tree).unsqueeze(1)).sum(-1)  # [B, N]
        place = path.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return place > tree.nodes // 2

    dropping(patch, drop)


@bug
def duplicates_merged(patch: pytest.MonkeyPatch) -> None:
    dropping(patch, twins)


def twins(tree: TokenTree) -> Tensor:
    """[B, N] the nodes whose token an earlier sibling has."""
    parents, tokens = tree.topology.parents, tree.tokens
    same = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (
        tokens.unsqueeze(1) == tokens.unsqueeze(2)
    )
    return same.tril(-1).any(-1)


@bug
def twins_of_several_drafters_merged(patch: pytest.MonkeyPatch) -> None:
    dropping(patch, twins, Union)


@bug
def draws_shared_by_several_drafters(patch: pytest.MonkeyPatch) -> None:
    """Both roots have number 0, and so the same uniforms."""
    true = children.Children.take
    patch.setattr(
        children.Children, "take", lambda self, *args: true(replace(self, first=0), *args)
    )


@bug
def one_q_for_several_drafters(patch: pytest.MonkeyPatch) -> None:
    """The children of the root are all weighed by one drafter's proposals."""
    patch.setattr(Union, "_turns", ())


@bug
def off_by_one_depth(patch: pytest.MonkeyPatch) -> None:
    """The last token, drawn after a node, is written in that node's place."""
    true = Accepted.up_to

    def up_to(tree: TokenTree, node: Tensor, last: Tensor) -> Accepted:
        return true(tree, tree.topology.parent_or_root.gather(1, node), last)

    patch.setattr(Accepted, "up_to", up_to)


@bug
def off_by_one_head(patch: pytest.MonkeyPatch) -> None:
    """Children are drawn from the head of the next depth, and verified with their own."""
    true = static.rows_of

    def rows_of(step: Any, first: int, last: int) -> Any:
        rows = step.logits.shape[1]
        return true(step, min(first + 1, rows - 1), min(last + 1, rows))

    patch.setattr(static, "rows_of", rows_of)


@bug
def uniform_fallback_when_exhausted(patch: pytest.MonkeyPatch) -> None:
    """Past its support q counts as uniform, over all tokens; drawn are those not drawn before.

    Drawing and weighing both fall back, so this one takes two functions.
    """
    take, without = children.Children.take, siblings.without

    def taken(self: Any, step: Any, *args: Any) -> Tensor:
        flat = replace(step, logits=self.sampling.warp(step.logits).clamp(min=-50))
        return take(replace(self, sampling=replace(self.sampling, processors=None)), flat, *args)

    def fallback(q: Tensor, token: Tensor) -> Tensor:
        left = without(q, token)
        return torch.where(left.sum(1, keepdim=True) > 0, left, 1 / q.shape[1])

    patch.setattr(children.Children, "take", taken)
    everywhere(patch, "without", fallback)


@bug
def q_cast_to_bfloat16(patch: pytest.MonkeyPatch) -> None:
    true = siblings.proposal

    def proposal(verified: Verified, node: Tensor) -> Tensor | None:
        q = true(verified, node)
        return None if q is None else q.bfloat16().to(q.dtype)

    everywhere(patch, "proposal", proposal)


TREES = ("rejection", "traversal")
"""The rules of trees that weigh children by what they were drawn from."""
CHAINS = ("block",)
"""Those of chains."""
DRAWN = SAMPLED
CHILDREN = ("topk", *DRAWN)


@dataclass(frozen=True)
class Where:
    """The rules, children, tree and processors with which a bug does harm."""

    rules: tuple[str, ...]
    expansions: tuple[str, ...] = DRAWN
    tree: str = "cartesian"
    warp: str = "hot"
    seed: int = 1


HARM = {
    "uniforms reused across nodes": Where(TREES, CHILDREN),
    "verdict reused for the last token": Where(TREES, CHILDREN, "wide"),
    "childrens draws reused across nodes": Where(("traversal",), ("with_replacement",)),
    "wrong target row": Where(TREES, CHILDREN),
    "wrong bonus row": Where(TREES, CHILDREN),
    "residual not renormalised": Where(TREES, CHILDREN, "wide", seed=0),
    "residual softmaxed": Where(TREES, CHILDREN),
    "verified with another q": Where(TREES),
    "target unprocessed": Where(TREES, CHILDREN),
    "residual of replacement used without": Where(TREES, ("without_replacement",)),
    "siblings resorted": Where(TREES, DRAWN, "wide"),
    "drawn child pruned": Where(TREES, DRAWN, "wide"),
    "drawn children reranked": Where(TREES, DRAWN, "wide"),
    "duplicates merged": Where(TREES, ("with_replacement",), "wide"),
    "twins of several drafters merged": Where(TREES, DRAWN, "union"),
    "draws shared by several drafters": Where(TREES, DRAWN, "union"),
    "one q for several drafters": Where(TREES, DRAWN, "union"),
    "off by one depth": Where(TREES, CHILDREN),
    "off by one head": Where(TREES, DRAWN, "cartesian of heads"),
    "uniform fallback when exhausted": Where(TREES, ("without_replacement",), "wide", "top_k"),
    "q cast to bfloat16": Where(TREES),
}

CHAIN = (
    "uniforms reused across nodes",
    "verdict reused for the last token",
    "wrong target row",
    "wrong bonus row",
    "residual softmaxed",
    "verified with another q",
    "target unprocessed",
    "off by one depth",
    "q cast to bfloat16",
)
"""The bugs that also harm a chain, and with it the rules of chains."""

Trial = tuple[str, str, str, Where]  # bug, rule, expansion and the rest


def trials() -> list[Trial]:
    """Every bug with every pair in which it must be seen."""
    found = [
        (name, rule, expansion, where)
        for name, where in HARM.items()
        for rule in where.rules
        for expansion in where.expansions
    ]
    for name in CHAIN:
        where = replace(HARM[name], tree="chain")
        found += [(name, rule, each, where) for rule in CHAINS for each in where.expansions]
    return found


def identity(trial: Trial) -> str:
    name, rule, expansion, _ = trial
    return f"{name}-{rule}-{expansion}".replace(" ", "_")


def test_every_bug_is_tried() -> None:
    assert set(BUGS) == set(HARM)


def test_every_rule_that_draws_is_tried() -> None:
    drawing = {name for name, rule in RULES.items() if rule.exact and not rule.same_text}
    assert {rule for _, rule, _, _ in trials()} == drawing


@cache
def true_distance(rule: str, expansion: str, tree: str, warp: str, seed: int) -> float:
    """Total variation to the target without any bug."""
    return round_of((expansion, rule), SMALL[tree], warp, seed).distance()


def distance(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Total variation to the target: of the true code, and of the code with the bug."""
    name, rule, expansion, where = trial
    played = round_of((expansion, rule), SMALL[where.tree], where.warp, where.seed)
    true = true_distance(rule, expansion, where.tree, where.warp, where.seed)
    with monkeypatch.context() as patch:
        BUGS[name](patch)
        return true, played.distance()


@torch.no_grad()
@pytest.mark.parametrize("trial", trials(), ids=identity)
def test_the_bug_is_killed(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    true, buggy = distance(trial, monkeypatch)
    assert true <= EXACT
    assert buggy > KILLED


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("childrens draws reused across nodes", "cartesian"),
        ("residual not renormalised", "chain"),
    ],
)
def test_what_is_harmless_under_rejection(
    name: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two that other rules or trees kill are no bugs here: the enumeration says so too."""
    trial = (name, "rejection", "with_replacement", Where((), tree=tree))
    assert max(distance(trial, monkeypatch)) <= EXACT


@torch.no_grad()
@pytest.mark.proof
def test_the_table_of_bugs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every bug on three targets and drafters, and the table of who killed it."""
    worst, lines = 0.0, []
    for name, rule, expansion, where in trials():
        cases = [(name, rule, expansion, replace(where, seed=seed)) for seed in (0, 1, 2)]
        found = [distance(trial, monkeypatch) for trial in cases]
        worst = max(worst, *(true for true, _ in found))
        most = max(buggy for _, buggy in found)
        killer = f"{rule} x {expansion} x {where.tree}, {where.warp}"
        lines.append(f"{name:<40}{killer:<60}{most:.1e}")
        assert most > KILLED, (name, killer)
    with capsys.disabled():
        print(f"\n{'bug':<40}{'killed by':<60}TV")
        print("\n".join(lines))
        print(f"{'none: the true code on all of them':<100}{worst:.1e}")
    assert worst <= EXACT
