"""Every legal pair of expansion and rule keeps the target's distribution: shown by enumeration.

The rules that choose by the target's own noise are shown another way: their text is the one that
the target chooses without a drafter, token by token. `typical` must fail what all others pass.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import OptionError, Sampling
from headstart.heads.core import row_seeds
from headstart.infer.rules.registry import RULES
from headstart.infer.trees.expansions import SAMPLED
from tests.support.covering import covering
from tests.support.enumeration import POSITION, ROOT, Round
from tests.support.rounds import EXACT, LEGAL, SHOWS, SMALL, WARPS, Shape, round_of

CHOSEN = [pair for pair in LEGAL if RULES[pair[1]].same_text]  # by the text and the row's noise
APPROXIMATE = [pair for pair in LEGAL if not RULES[pair[1]].exact]
ENUMERATED = [pair for pair in LEGAL if pair not in CHOSEN and pair not in APPROXIMATE]


FULL: dict[str, Shape] = {
    "long chain": ("chain:4", 3, "levels", None),
    "chain": ("chain:3", 4, "levels", None),
    "chain at V=6": ("chain:2", 6, "levels", None),
    "wide": ("cartesian:4", 6, "levels", None),
    "cartesian": ("cartesian:2,2", 4, "levels", None),
    "cartesian of heads": ("cartesian:2,2", 4, "heads", None),
    "deep": ("cartesian:2,1,1", 3, "levels", None),
    "uneven": ("[[0],[1],[2],[0,0],[1,0],[1,1]]", 4, "levels", None),
    "narrow": ("[[0],[1],[0,0],[0,1]]", 6, "levels", [3, 1, 4, 0]),
    "candidates": ("cartesian:3,2,1", 5, "lookup", None),
    "best first": ("best-first:12,3,3", 5, "levels", None),
    "best first of heads": ("best-first:12,4,3", 5, "heads", None),
    "beam": ("beam:3,3", 5, "levels", None),
    "beam of heads": ("beam:3,3,6", 5, "heads", None),
    "union": ("[[0],[1],[0,0],[1,0]]+cartesian:2", 3, "levels+heads", None),
    "union of three": ("cartesian:2+chain:1+chain:2", 3, "heads+levels+levels", None),
    "union of vocabularies": ("[[0],[1],[0,0]]+chain:2", 4, "heads+levels", [3, 1]),
    "union with candidates": ("cartesian:2+cartesian:2,1", 4, "levels+lookup", None),
    "union of candidates first": ("cartesian:2,1+cartesian:2", 4, "lookup+heads", None),
    "union grown anew": ("beam:2,3+chain:3+best-first:8,2,3", 4, "levels+lookup+heads", None),
}


DYNAMIC = ("best-first", "beam")


def applies(pair: tuple[str, str], tree: str, warp: str = "plain") -> bool:
    """Whether the pair takes that tree and those processors."""
    expansion, rule = pair
    if RULES[rule].chains_only and (not tree.startswith("chain") or "+" in tree):
        return False
    if expansion in SAMPLED and any(name in tree for name in DYNAMIC):
        return False
    return warp not in ("prefix", "form") or RULES[rule].reads_prefix


Case = tuple[tuple[str, str], str, str]  # the pair, the name of a shape, and of the processors


def cases(shapes: dict[str, Shape], pairs: list[tuple[str, str]]) -> list[Case]:
    return [
        (pair, name, warp)
        for pair in pairs
        for name, shape in shapes.items()
        for warp in WARPS
        if applies(pair, shape[0], warp)
    ]


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


def check(pair: tuple[str, str], shape: Shape, warp: str, seed: int = 1) -> None:
    trial = round_of(pair, shape, warp, seed)
    assert trial.distance() <= EXACT


@torch.no_grad()
@pytest.mark.parametrize(("pair", "shape", "warp"), covering(cases(SMALL, ENUMERATED)), ids=named)
def test_the_round_has_the_law_of_the_target(pair: tuple[str, str], shape: str, warp: str) -> None:
    check(pair, SMALL[shape], warp)


@torch.no_grad()
@pytest.mark.proof
@pytest.mark.parametrize(("pair", "shape", "warp"), cases(FULL, ENUMERATED), ids=named)
def test_the_round_has_the_law_of_the_target_in_full(
    pair: tuple[str, str], shape: str, warp: str
) -> None:
    for seed in (0, 2):
        check(pair, FULL[shape], warp, seed)


def test_every_legal_pair_has_its_proof() -> None:
    """By enumeration, by its plain text, or, for what is approximate, by failing."""
    assert {*ENUMERATED, *CHOSEN, *APPROXIMATE} == set(LEGAL)
    assert {rule for _, rule in LEGAL} == set(RULES)
    for pair in ENUMERATED:
        assert any(case[0] == pair for case in cases(SMALL, ENUMERATED))


def ask(pair: tuple[str, str], trial: Round) -> None:
    """What a speculator checks before it decodes."""
    drafter: Any = trial.tables
    expansion: Any = pair[0]
    trial.policy.check(drafter, expansion)
    trial.rule.check_tree(trial.policy)
    trial.rule.check_sampling(Sampling(processors=trial.processors))


@pytest.mark.parametrize("pair", ENUMERATED, ids="-".join)
def test_what_is_not_proved_is_refused(pair: tuple[str, str]) -> None:
    for shape in SMALL.values():
        for warp in ("plain", "prefix", "penalty", "form"):
            trial = round_of(pair, shape, warp)
            if applies(pair, shape[0], warp):
                ask(pair, trial)
                continue
            with pytest.raises(OptionError):
                ask(pair, trial)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_gaps_between_drawn_siblings_are_refused_and_would_show(rule: str) -> None:
    """Medusa's trees leave ranks out: the rule then takes q for what it was one draw before."""
    pair = ("without_replacement", rule)
    trial = round_of(pair, ("[[0],[2]]", 5, "levels", None))
    with pytest.raises(OptionError, match="biases"):
        ask(pair, trial)
    assert trial.distance(ranks=3) > SHOWS
    independent = round_of(("with_replacement", rule), ("[[0],[2]]", 5, "levels", None))
    assert independent.distance() <= EXACT


@torch.no_grad()
@pytest.mark.parametrize("shape", ["chain", "wide", "cartesian"])
@pytest.mark.parametrize("pair", APPROXIMATE, ids="-".join)
def test_approximate_rules_fail_the_same_test(pair: tuple[str, str], shape: str) -> None:
    """The negative control: a rule that does not keep the distribution is seen."""
    for warp in ("plain", "hot"):
        assert round_of(pair, SMALL[shape], warp).distance() > SHOWS


@torch.no_grad()
def test_the_enumeration_is_not_empty() -> None:
    """A round on which the drafter is of use: boxes differ, and some accept to the very end."""
    trial = round_of(("without_replacement", "rejection"), SMALL["cartesian"])
    found = trial.law()
    assert found.boxes > 400 and len(found.law) == 27
    assert float(found.lengths.sum()) == pytest.approx(1, abs=EXACT)
    assert (found.lengths[1:] > 0.05).all()  # rounds of one, two and three tokens


@torch.no_grad()
@pytest.mark.parametrize("shape", list(SMALL))
@pytest.mark.parametrize("pair", CHOSEN, ids="-".join)
def test_the_round_writes_what_the_target_chooses(pair: tuple[str, str], shape: str) -> None:
    """By the row's noise or greedily, whatever the tree holds: no distribution can differ then."""
    if not applies(pair, SMALL[shape][0]):
        return
    rows, agreed, deep = 500, 0, 0
    for warp in ("plain", "top_p", "prefix", "penalty", "form"):
        trial = round_of(pair, SMALL[shape], warp, apart=0.4)
        seeds = row_seeds(7, rows) if trial.rule.samples else None
        sampling = Sampling(seeds, trial.processors, torch.float64)
        accepted = trial.play(sampling, rows)
        plain = chosen_text(trial, sampling, rows)
        written = torch.arange(plain.shape[1]) < accepted.count.unsqueeze(1)
        assert torch.equal(accepted.tokens[written], plain[written])
        agreed += int(written.sum())
        deep += int((accepted.count > 1).sum())
    assert agreed > 3 * rows and deep > rows // 4


def chosen_text(trial: Round, sampling: Sampling, rows: int) -> Tensor:
    """[rows, D + 1] what the target chooses, token by token, without a drafter."""
    tables = trial.tables
    text = torch.full((rows, 1), ROOT)
    code = torch.zeros(rows, dtype=torch.long)
    for depth, logits in enumerate(tables.target):
        scores = sampling.process(text, logits[code])
        positions = torch.full((rows, 1), POSITION + depth + 1)
        token = sampling.choose(scores.unsqueeze(1), positions)  # [rows, 1]
        text = torch.cat([text, token], 1)
        code = code * tables.vocab + token.squeeze(1)
    return text[:, 1:]
