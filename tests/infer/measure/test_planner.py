"""The planner: its costs, its choice under known costs, and the plans it files."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    family,
    fingerprint,
    save_drafter,
)
from headstart.heads.artifacts.plan import Plan, find_plans, plan_key, write_plan
from headstart.heads.medusa import Medusa
from headstart.heads.suffix import Suffix, SuffixConfig
from headstart.infer import Speculator, StaticTree
from headstart.infer.measure import candidates, planner
from headstart.infer.measure.costs import (
    STEPS,
    Costs,
    _loop_cost,
    decode_times,
    measure_costs,
    sizes,
)
from headstart.infer.measure.forward_costs import output_cost
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.planner import make_plan
from headstart.infer.measure.ranks import Replayed, measure_ranks, replay
from headstart.infer.target import Target
from headstart.reports.plans import print_plan
from tests.support.counting import SIZE, counting_drafter, counting_rows, counting_target
from tests.support.tiny import VOCAB, tiny

PLAIN = 10.0


def costs(per_node: float, extend: float = 0.0) -> Costs:
    """A machine on which each node beyond the first costs so much."""
    verify = {n: PLAIN + per_node * (n - 1) for n in (1, 64)}
    return Costs(PLAIN, verify, 0.5, {1: extend, 64: extend} if extend else {}, (0.0, 0.0, 0.0))


def unsure(target: Any, heads: int = 3) -> Medusa:
    """Heads that are right for even tokens; for odd ones the right token stands second."""
    drafter = counting_drafter(target, heads)
    assert drafter.output is not None
    with torch.no_grad():
        odd = (torch.arange(SIZE) % 2).float()  # [V]
        for head in range(heads):
            drafter.output[head] += 2 * torch.eye(SIZE).roll(head + 5, 0) * odd
    return drafter


def hopeless(target: Any) -> Medusa:
    """Heads that put the right token last."""
    drafter = counting_drafter(target, 3)
    assert drafter.output is not None
    with torch.no_grad():
        drafter.output.neg_()
    return drafter


def plan_of(drafter: Medusa, given: Costs, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    monkeypatch.setattr(planner, "measure_costs", lambda *args: given)
    prompts = list(counting_rows(4, 5))
    return make_plan(drafter.target, drafter, prompts, new_tokens=17, **options)


def test_free_nodes_make_large_trees_and_dear_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = unsure(counting_target())
    free = plan_of(drafter, costs(0.0), monkeypatch)
    # Tokens alternate: one deep path each for even and odd roots takes them all.
    assert free.tau == 4.0 and free.speedup == pytest.approx(4 * PLAIN / (PLAIN + 0.5))
    assert len(free.tree) >= 6 and free.policy != "plain"
    some = plan_of(drafter, costs(2.0), monkeypatch)
    assert 0 < len(some.tree) < len(free.tree)
    dear = plan_of(drafter, costs(40.0), monkeypatch)
    assert (dear.policy, dear.tree, dear.tau, dear.speedup) == ("plain", [], 1.0, 1.0)
    assert dear.candidates and all(c["speedup"] < 1.02 for c in dear.candidates)


def test_a_useless_drafter_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = counting_target()
    wrong = plan_of(hopeless(target), costs(0.0), monkeypatch)
    assert wrong.policy == "plain" and wrong.tree == []
    assert wrong.candidates and all(c["nodes"] > 1 for c in wrong.candidates)
    right = plan_of(counting_drafter(target, 3), costs(0.0), monkeypatch)
    assert right.tau == 4.0 and right.policy == "chain:3"


def test_the_promise_is_what_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = unsure(counting_target())
    plan = plan_of(drafter, costs(0.5), monkeypatch, measure=100)
    prompts = list(counting_rows(4, 5))
    ranks = measure_ranks(drafter, write_texts(drafter.target, drafter, prompts, 17))
    assert plan.candidates
    for candidate in plan.candidates:
        assert candidate["measured_tau"] == pytest.approx(replay(ranks, candidate["tree"]).tau)
        if not candidate["name"].startswith(("sparse", "optimal")):  # those promise less
            assert candidate["measured_tau"] == pytest.approx(candidate["tau"])
    measured = [candidate["measured_speedup"] for candidate in plan.candidates]
    assert measured == sorted(measured, reverse=True) and measured[-1] > 0


def test_what_is_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = unsure(counting_target())
    slow = planner.decode_times

    def slower(*args: Any) -> Any:
        found = slow(*args)
        for name in found.per_round:
            found.per_round[name] = [1.0 if name == "plain" else 9.0] * len(found.per_round[name])
        return found

    monkeypatch.setattr(planner, "decode_times", slower)
    plan = plan_of(drafter, costs(0.0), monkeypatch, measure=2)
    assert plan.policy == "plain"
    assert [c["measured_speedup"] is not None for c in plan.candidates[:3]] == [True, True, False]


def test_a_drafter_that_observes_decodes_with_trees_of_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks promise less than its larger trees bring, so what is measured decides."""
    model = tiny("llama")
    drafter = family("recycling").of_target(model).bind(model)
    monkeypatch.setattr(planner, "measure_costs", lambda *args: costs(0.5))
    prompts = list(torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(3)))
    plan = make_plan(model, drafter, prompts, new_tokens=24, measure=1, max_nodes=16)
    tried = [each for each in plan.candidates if each["measured_tau"] is not None]
    assert plan.candidates[: len(tried)] == tried
    sizes_of_all = {each["nodes"] for each in plan.candidates}
    assert sorted(each["nodes"] for each in tried) == sorted(sizes_of_all) and len(tried) > 4
    largest = max(tried, key=lambda each: each["nodes"])
    assert largest["measured_tau"] > largest["tau"]


def test_trees_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = unsure(counting_target())
    for most in (2, 5, 20):
        plan = plan_of(drafter, costs(0.0), monkeypatch, max_nodes=most)
        assert plan.candidates
        assert all(c["nodes"] <= most and c["depth"] <= 3 for c in plan.candidates)
        assert all(StaticTree(c["tree"]).nodes == c["nodes"] for c in plan.candidates)


def test_a_count_that_costs_more_than_a_larger_one_is_never_picked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a CPU in float32: two rows take nearly twice as long as one, eight less than two."""
    drafter = counting_drafter(counting_target(), 3)
    measured = {1: 10.0, 2: 18.0, 3: 17.0, 4: 16.0, 6: 16.0, 8: 15.0, 12: 19.0, 16: 25.0, 64: 90.0}
    uneven = replace(costs(0.0), verify=measured)
    assert [n for n in range(1, 20) if uneven.dearer(n)] == [2, 3, 4, 5, 6, 7]
    plan = plan_of(drafter, uneven, monkeypatch)
    assert plan.candidates and all(c["nodes"] == 1 or c["nodes"] >= 8 for c in plan.candidates)
    # Where there is no larger tree, the dear one is compared with plain decoding all the same.
    small = plan_of(drafter, replace(uneven, verify={1: 10.0, 2: 18.0, 8: 15.0}), monkeypatch)
    assert small.candidates


def test_heads_with_a_large_output_layer_are_told_of_trimmed_ones() -> None:
    drafter = counting_drafter(counting_target(), 3)
    assert output_cost(drafter, 1) > 0
    plan = Plan(
        "cpu", "float32", 1, "chain:3", [[0]], 2.0, 1.5, [[1.0]],
        {**asdict(costs(0.0)), "output": 4.0}, [{"name": "chain:3", "round_ms": 16.0, "nodes": 4,
        "depth": 3, "tau": 2.0, "speedup": 1.5, "measured_speedup": None}], 4, 8,
    )  # fmt: skip
    out = io.StringIO()
    print_plan(plan, out)
    said = " ".join(out.getvalue().split())
    assert "takes 4.00 ms of a round of 16.00 ms" in said and "less than 19% of the tokens" in said
    plan.costs["output"] = 1.0
    print_plan(plan, again := io.StringIO())
    assert "quarter of the vocabulary" not in " ".join(again.getvalue().split())


def test_a_level_that_costs_makes_the_tree_shallow() -> None:
    deep, wide = StaticTree.chain(4), StaticTree([[0], [1], [2], [3]])
    one = costs(0.0, extend=3.0)
    assert one.round(wide) == pytest.approx(PLAIN + 0.5)
    assert one.round(deep) == pytest.approx(PLAIN + 0.5 + 3 * 3.0)
    assert one.round(StaticTree([])) == PLAIN
    assert replace(one, loop=(1.0, 0.1, 0.2)).round(wide) == pytest.approx(PLAIN + 0.5 + 1.7)
    assert replace(one, loop=(-5.0, 0.0, 0.0)).round(wide) == pytest.approx(PLAIN + 0.5)


def test_a_batch_waits_for_its_last_row() -> None:
    ranks = [torch.zeros(8, 1, dtype=torch.long), torch.full((8, 1), 5)]
    shapes = [candidates.ReplayedTree("chain:1", [[0]], Replayed([8, 8], [4, 8]))]
    alone = candidates.expected_speedups(iter(shapes), ranks, costs(0.0), batch_size=1)[0]
    together = candidates.expected_speedups(iter(shapes), ranks, costs(0.0), batch_size=2)[0]
    assert alone.speedup == pytest.approx(16 / 12 * PLAIN / (PLAIN + 0.5))
    assert together.speedup == pytest.approx(PLAIN / (PLAIN + 0.5))
    assert alone.tau == together.tau == 16 / 12


def test_fitted_trees_are_judged_on_other_texts() -> None:
    """Each text repeats a rank of its own: what fits one says nothing about the next."""
    ranks = [torch.full((20, 1), rank) for rank in range(4)]
    shapes = {shape.name: shape for shape in candidates.replayed_trees(ranks, 4, True)}
    assert shapes["sparse:4"].done.tau == 1.0
    assert len(shapes["sparse:4"].paths) == 3  # fitted to all of them


def test_the_costs_are_measured() -> None:
    target = counting_target()
    drafter = counting_drafter(target, 3)
    ticks: list[None] = []
    texts = write_texts(target, drafter, list(counting_rows(2, 5)), 20)
    found = measure_costs(target, drafter, texts, 8, 3, lambda: ticks.append(None))
    assert len(ticks) == STEPS
    assert list(found.verify) == sizes(8) and min(found.verify.values()) > 0
    assert found.begin > 0 and found.extend == {} and found.plain > 0
    assert found.round(StaticTree.chain(3)) > found.verify[4]


def test_a_large_tree_does_not_decide_what_a_small_one_costs() -> None:
    """Its round is off by a tenth, which is more than all of a small one's."""
    given = costs(per_node=0.5)
    small, large = StaticTree.chain(1), StaticTree([[rank] for rank in range(63)])
    deep = StaticTree([[0] * 3, *([rank] for rank in range(1, 61))])
    trees = [small, StaticTree.chain(3), large, deep]
    rounds = {tree: given.forwards(tree) + 1.0 for tree in trees}
    rounds[deep] *= 1.1
    fitted = replace(given, loop=_loop_cost(given, rounds))
    assert fitted.round(small) == pytest.approx(rounds[small], rel=0.04)
    exact = replace(given, loop=_loop_cost(given, rounds | {deep: rounds[deep] / 1.1}))
    assert exact.loop == pytest.approx((1.0, 0.0, 0.0), abs=1e-9)


def test_what_is_timed_runs_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying, the probes, plain decoding, and what is measured at the end."""
    drafter, asked = counting_drafter(counting_target(), 3), list[Any]()
    true = Target.__init__

    def noted(self: Target, *given: Any, compile: Any = False, **options: Any) -> None:
        asked.append(compile)
        true(self, *given, **options)

    monkeypatch.setattr(Target, "__init__", noted)
    options: dict[str, Any] = {"new_tokens": 9, "max_nodes": 4, "measure": 1}
    plan = make_plan(drafter.target, drafter, list(counting_rows(1, 5)), compile="way", **options)
    assert plan.compiled and asked.count("way") == 7 and asked.count(False) == 1  # writes the text
    asked.clear()
    assert not make_plan(drafter.target, drafter, list(counting_rows(1, 5)), **options).compiled
    assert set(asked) == {False}


def test_real_rounds_are_counted() -> None:
    target = counting_target()
    speculators = {"plain": Speculator(target), "chain": Speculator(target, unsure(target))}
    rows = counting_rows(3, 5)
    found = decode_times(speculators, [list(rows[:2]), [rows[2, :4]]], 9)
    assert found.tokens == {"plain": 24, "chain": 24}
    assert found.loops["plain"] == 16 and found.rounds["plain"] == 24
    assert found.loops["chain"] < found.rounds["chain"] < 24
    assert [len(each) for each in found.per_round.values()] == [2, 2]


def test_what_trials_write_is_not_remembered() -> None:
    """Each prompt comes several times, and its answer would be drafted."""
    target = tiny("llama")
    drafter = Suffix(SuffixConfig.for_target(target)).bind(target)
    chain = {"chain": Speculator(target, drafter, tree="chain:3")}
    prompts = [torch.tensor([1, 2, 3])]
    once, often = (decode_times(chain, [prompts] * n, 24) for n in (1, 4))
    assert often.rounds["chain"] == 4 * once.rounds["chain"] > 4 * 24 / 3


@pytest.mark.parametrize(
    "options", [{"batch_size": 5}, {"max_nodes": 1}, {"batch_size": 0}, {"measure": -1}]
)
def test_refusals(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="planning needs a prompt for each row"):
        plan_of(unsure(counting_target()), costs(0.0), monkeypatch, **options)


def test_texts_that_end_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = counting_target()
    target.generation_config.eos_token_id = list(range(SIZE))  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="after its first token"):
        plan_of(unsure(target), costs(0.0), monkeypatch)


# Plans on disk.


def saved(folder: Path, drafter: Medusa) -> Path:
    return save_drafter(drafter, folder, Manifest("medusa", "t", fingerprint(drafter.target)))


def test_plans_for_several_machines_live_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = unsure(counting_target())
    folder = saved(tmp_path / "heads", drafter)
    target: Any = drafter.target
    assert find_plans(folder, target) == []
    plan = plan_of(drafter, costs(0.5), monkeypatch)
    assert write_plan(folder, plan) == folder / "plan.json"
    write_plan(folder, replace(plan, batch_size=8, tree=[[0]]))
    write_plan(folder, replace(plan, device="another machine", tree=[]))
    write_plan(folder, replace(plan, temperature=0.7, tree=[[2]]))
    assert len(json.loads((folder / "plan.json").read_text())) == 4

    def trees(compiled: bool = False) -> dict[Any, Any]:
        found = find_plans(folder, target, compiled)
        return {(plan.batch_size, plan.temperature): plan.tree for plan in found}

    known = {(1, 0.0): plan.tree, (8, 0.0): [[0]], (1, 0.7): [[2]]}
    assert trees() == known
    # Forwards that are made faster have plans of their own; without one they follow the other one,
    # and the other way round.
    assert trees(compiled=True) == known
    write_plan(folder, replace(plan, compiled=True, tree=[[1]]))
    assert trees(compiled=True) == known | {(1, 0.0): [[1]]} and trees() == known
    write_plan(folder, replace(plan, batch_size=5, compiled=True, tree=[[3]]))
    assert trees() == known | {(5, 0.0): [[3]]}
    assert find_plans(folder, target.double()) == []
    target.float()
    assert not list(folder.glob(".plan*"))
    # Other weights under the same plan: it was not measured with them.
    text = (folder / "plan.json").read_text()
    with torch.no_grad():
        drafter.bias.add_(1)
    saved(folder, drafter)
    (folder / "plan.json").write_text(text)
    assert find_plans(folder, target) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"KEY": {"tree": []}}', '{"KEY": 3}'])
def test_a_damaged_plan_is_named_and_can_be_replaced(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = unsure(counting_target())
    folder = saved(tmp_path / "heads", drafter)
    plan = plan_of(drafter, costs(0.5), monkeypatch)
    key = plan_key(plan.device, plan.dtype, plan.batch_size)
    (folder / "plan.json").write_text(text.replace("KEY", key))
    target: Any = drafter.target
    with pytest.raises(ArtifactError, match="delete it, or run headstart plan again"):
        find_plans(folder, target)
    write_plan(folder, plan)
    (found,) = find_plans(folder, target)
    assert found.tree == plan.tree
    data = json.loads((folder / "plan.json").read_text())
    data[key]["tau"] = "fast"
    (folder / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match="delete it, or run headstart plan again"):
        find_plans(folder, target)
