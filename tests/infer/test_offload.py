"""Targets whose weights are streamed in: the same text, no graphs, and plans of their own."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.offload import OffloadedWeightsLoader

from headstart.heads import (
    Manifest,
    OptionError,
    TrainableDrafter,
    family,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.plan import find_plans, machine, write_plan
from headstart.heads.families import KNOWN
from headstart.infer import Speculator, graphs
from headstart.infer.measure import forward_costs, planner
from headstart.infer.measure.bench import bench
from headstart.infer.measure.candidates import rank_trees
from headstart.infer.measure.costs import Costs, measure_costs
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.planner import make_plan
from headstart.infer.measure.ranks import MISSED
from headstart.infer.measure.round_parts import round_parts
from headstart.infer.measure.timing import interleaved
from headstart.infer.trees.static import StaticTree
from tests.support.counting import counting_drafter, counting_rows, counting_target
from tests.support.families import TREES, own
from tests.support.families import target as target_of
from tests.support.late_copies import as_on_a_gpu
from tests.support.streamed import PLACES, fetched, streamed, streamed_tiny
from tests.support.tiny import one_line, prompts, tiny


def saved(name: str, folder: Path) -> Any:
    """Save a drafter with random weights; the target it was made for, with its adapter."""
    torch.manual_seed(5)
    target, cls = copy.deepcopy(target_of(own(name))), family(name)
    config: Any = cls.config_class
    made = cls(config.for_target(target, **KNOWN[name].small)).double().bind(target)
    if isinstance(made, TrainableDrafter):
        made.init_from_target(torch.arange(target.config.vocab_size))
    moved = list(made.parameters())
    if made.adapter is not None:
        made.adapter.attach(target)
        moved += made.adapter.parameters()
    with torch.no_grad():
        for parameter in moved:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_drafter(made.eval(), folder, Manifest(name, "tiny", fingerprint(target)))
    return target


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "disk") for name in KNOWN), ("medusa", "cpu"), ("medusa", "map")],
)
def test_greedy_text_is_that_of_generate(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact loads onto a target that is elsewhere; drafting waits for none of its weights."""
    whole = saved(name, tmp_path / "heads")
    model = streamed(target_of(own(name)), place, tmp_path)
    before = machine(model)
    draft: Any = load_drafter(tmp_path / "heads", model, dtype=torch.float64)
    assert machine(model) == before, "its plan is looked up before it is loaded"
    drafting, fetched = [False], [0]
    fetch = OffloadedWeightsLoader.__getitem__

    def watched(self: Any, key: str) -> Any:
        assert not drafting[0], f"{key} is fetched to draft"
        fetched[0] += 1
        return fetch(self, key)

    def drafts(call: Any) -> Any:
        def run(*args: Any) -> Any:
            drafting[0] = True
            step = call(*args)
            drafting[0] = False
            return step

        return run

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", watched)
    for call in ("begin", "extend"):
        monkeypatch.setattr(draft, call, drafts(getattr(draft, call)))
    for batch in (1, 2):
        ids, mask = prompts([9, 4][:batch])
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        options |= {"pad_token_id": 0}
        expected = whole.generate(ids, **options)
        assert torch.equal(model.generate(ids, **options), expected)
        speculator = Speculator(model, draft, tree=TREES[1])
        assert torch.equal(speculator.generate(ids, **options), expected)
        assert speculator.stats.rounds > 0
    assert fetched[0] or place == "cpu"


def test_no_graph_repeats_what_comes_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = streamed_tiny("disk", tmp_path)
    with pytest.raises(OptionError) as caught:
        Speculator(model, graphs=True)
    assert "leave graphs out" in one_line(caught.value)
    # As on a GPU, of which the choice sees no more than this.
    monkeypatch.setattr(graphs, "device_of", lambda model: torch.device("cuda"))
    assert Speculator(model).graphs is None
    assert Speculator(tiny("llama")).graphs is not None
    assert forward_costs.captures_rounds is graphs.captures_rounds, "what is timed"


def test_no_graph_repeats_what_needs_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "device_of", lambda model: torch.device("cuda"))
    target = counting_target()
    assert graphs.captures_rounds(target)
    next(target.parameters()).ds_id = 0  # type: ignore[attr-defined]  # a shard of ZeRO-3's
    assert not graphs.captures_rounds(target)


def test_a_plan_is_for_weights_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = counting_target()
    drafter = counting_drafter(target, 3)
    save_drafter(drafter, tmp_path / "heads", Manifest("medusa", "t", fingerprint(target)))
    away = {place: streamed(target, place, tmp_path) for place in PLACES}
    assert len({machine(model) for model in (target, *away.values())}) == 4
    asked = []

    def flat(*args: Any) -> Costs:
        asked.append(args[3])
        return Costs(10.0, {1: 10.0, 768: 10.0}, 0.5, {}, (0.0, 0.0, 0.0))

    monkeypatch.setattr(planner, "measure_costs", flat)
    for model in (target, away["disk"]):
        drafter.bind(model)
        plan = make_plan(model, drafter, list(counting_rows(2, 5)), new_tokens=9)
        write_plan(tmp_path / "heads", plan)
    assert asked == [64, 768]
    assert plan.device.endswith("cpu, 100% from disk")
    again = streamed(target, "disk", tmp_path)
    assert find_plans(tmp_path / "heads", again) == find_plans(tmp_path / "heads", away["disk"])
    assert find_plans(tmp_path / "heads", again) and not find_plans(tmp_path / "heads", away["cpu"])


def test_its_costs_are_measured(tmp_path: Path) -> None:
    target = streamed(counting_target(), "disk", tmp_path)
    drafter = counting_drafter(target, 3)
    texts = write_texts(target, drafter, list(counting_rows(1, 5)), 6)
    found = measure_costs(target, drafter, texts, 3, 2)
    assert min(found.verify.values()) > 0 and found.plain > 0


def test_slow_calls_are_timed_less_often() -> None:
    called: list[str] = []
    calls = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    ticks: list[None] = []
    cpu = torch.device("cpu")
    times = interleaved(calls, cpu, 4, 2, lambda: ticks.append(None), seconds=0)
    assert len(ticks) == 4 and [len(each) for each in times.values()] == [1, 1]
    assert called == [*"aaa", *"bbb"]


@pytest.mark.parametrize(
    ("most", "depth"), [(192, 20), pytest.param(768, 24, marks=pytest.mark.proof)]
)
def test_nodes_that_cost_nothing_make_huge_trees(most: int, depth: int) -> None:
    """A drafter whose lists hold the text, but rarely first, and a target that is all streaming."""
    torch.manual_seed(1)
    ranks = [(torch.rand(200, depth) ** 14 * 48).long() for _ in range(4)]
    for level, each in product(range(1, depth), ranks):
        each[-level:, level] = MISSED
    flat = Costs(1e4, {1: 1e4, most: 1.001e4}, 1.0, {}, (0.0, 0.0, 0.0))
    best = rank_trees(ranks, flat, True, most)[0]
    assert best.nodes > most // 2 and best.depth >= 18
    assert max(max(path) for path in best.tree) >= 10
    assert StaticTree(best.tree).nodes == best.nodes


def test_a_streamed_target_is_measured_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are replayed through a patched forward, and its hooks stand there."""
    target, cls = streamed_tiny("disk", tmp_path), family("lookup")
    config: Any = cls.config_class
    lookup: Any = cls(config.for_target(target))
    speculator = Speculator(target, lookup.bind(target), tree="chain:2")
    ids = prompts([7])[0]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = speculator.generate(ids, **options)
    report = bench(speculator, [ids], 8, repeats=1)
    assert report
    assert torch.equal(speculator.generate(ids, **options), before)
    as_on_a_gpu(monkeypatch)
    with fetched() as keys:  # forwards are replayed as they ran, with layers read ahead
        parts = round_parts(speculator, lambda: speculator.generate(ids, **options), 1e3, 1)
    assert parts is not None and parts.verify > 0
    assert keys and not any("layers" in key for key in keys)
