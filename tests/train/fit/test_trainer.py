"""The trainer: labels that fit the decode loop, drafter-only checkpoints, resume, time, choice."""

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from headstart.heads import (
    FAMILIES,
    Drafter,
    DrafterConfig,
    Family,
    Manifest,
    OptionError,
    Step,
    TrainableDrafter,
    family,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.drafter import last_true
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import StaticTree
from headstart.train.fit import target_with_drafter
from headstart.train.fit.clock import Clock
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.fit.trainer import DrafterTrainer, last_checkpoint
from headstart.train.fit.validate import Validation, measure_tau
from headstart.train.processes import agreement
from headstart.train.recipe import Train
from tests.support.counting import SIZE, counting_drafter, counting_rows, counting_target
from tests.support.families import drafter as family_drafter
from tests.support.paths import ROOT
from tests.support.training import (
    IDLE,
    check_same_checkpoints,
    drafter_of,
    killed_and_resumed,
    rows,
    trainer_of,
)

SPEC = Train(learning_rate=3e-2, batch_size=4, max_steps=12, eval_every=4)


def fresh_drafter(target: Any, heads: int = 2) -> Medusa:
    drafter = Medusa(MedusaConfig.for_target(target, heads=heads, output="own"))
    drafter.bind(target)
    drafter.init_from_target()
    return drafter


def prompts(count: int = 3) -> list[Tensor]:
    return list(counting_rows(count, 4))


def validation(target: Any) -> Any:
    tree = StaticTree.chain(2)
    return lambda drafter: measure_tau(target, drafter, tree, "greedy", prompts(), 12)


def trainer(
    folder: Path,
    spec: Train = SPEC,
    validate: Any = None,
    drafter: Any = None,
    **arguments: Any,
) -> DrafterTrainer:
    drafter = fresh_drafter(counting_target()) if drafter is None else drafter
    return trainer_of(drafter, folder, spec, validate or validation(drafter.target), **arguments)


def weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_autocast_keeps_no_copies_where_memory_is_saved(
    own: bool, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether transformers' autocast is used, or our own, as under FSDP."""
    monkeypatch.setattr("headstart.train.fit.arguments.multiplies_in_bf16", lambda: not own)
    fitting = trainer(tmp_path, replace(SPEC, max_steps=1, activation_checkpointing=again))
    fitting.args.own_autocast = own  # type: ignore[attr-defined]
    seen, true = [], fitting.module.drafter.draft_hidden_states

    def noted(*given: Any, **options: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return true(*given, **options)

    monkeypatch.setattr(fitting.module.drafter, "draft_hidden_states", noted)
    fitting.fit()
    assert set(seen) == {(True, not again)}


@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_labels_fit_the_decode_loop(off_by: int) -> None:
    target = counting_target()
    drafter = counting_drafter(target, heads=3, off_by=off_by)
    with torch.no_grad():
        assert drafter.output is not None
        drafter.output.mul_(10)  # so that a right answer costs next to nothing
    tokens = counting_rows(4, 16)
    loss = TargetWithDrafter(target, drafter, 0.8)(
        torch.arange(4), tokens, torch.ones_like(tokens, dtype=torch.bool)
    )["loss"].item()
    measured = measure_tau(target, drafter, StaticTree.chain(3), "greedy", prompts(), 13)
    if off_by == 0:  # twelve tokens in three rounds of four, and the prefill's
        assert loss < 0.01 and measured["tau"] == 4.0
        assert measured["acceptance_by_depth"] == [1.0, 1.0, 1.0]
    else:
        assert loss > 10 and measured["tau"] == 1.0
        assert measured["acceptance_by_depth"] == [0.0, None, None]


def test_training_learns_to_count_and_leaves_the_target_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(SPEC, max_steps=60, eval_every=30))
    before = {name: tensor.clone() for name, tensor in run.module.target.state_dict().items()}
    report = run.fit()
    assert (
        report["tau"] == pytest.approx(33 / 12) and report["steps"] == 60
    )  # chain of 2: at best 3
    for name, tensor in run.module.target.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert run.module.target.training is False


def test_adams_settings_are_the_recipes(tmp_path: Path) -> None:
    spec = replace(SPEC, beta1=0.8, beta2=0.95, epsilon=1e-6)
    optimizer = trainer(tmp_path, spec).create_optimizer()
    assert optimizer.param_groups
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).trainable])
def test_no_norm_or_bias_decays(name: str, tmp_path: Path) -> None:
    made = copy.deepcopy(family_drafter(name, "tiny"))
    optimizer = trainer_of(
        made, tmp_path, replace(SPEC, weight_decay=0.1), lambda _: IDLE
    ).create_optimizer()
    decayed = [p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]]
    assert decayed and all(parameter.ndim > 1 for parameter in decayed)


def test_checkpoints_hold_the_drafter_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) <= 2 and all(name.startswith("checkpoint-") for name in names)
    for name in names:
        saved = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert set(saved) == {"weight", "bias", "output"}
        state = torch.load(tmp_path / name / "optimizer.pt", weights_only=True)
        assert len(state["state"]) == 3


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    report, resumed = killed_and_resumed(
        lambda folder, validate: trainer(folder, validate=validate),
        lambda drafter: validation(drafter.target)(drafter),
        tmp_path,
    )
    assert report["steps"] == resumed["steps"] == 12 and resumed["tau"] == report["tau"]
    check_same_checkpoints(tmp_path, "model.safetensors", "optimizer.pt")


def test_what_to_do_without_memory_is_said(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    forward, steps = run.module.forward, itertools.count(1)

    def last(*given: Any, **how: Any) -> Any:
        if next(steps) > 6:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, …"
            )
        return forward(*given, **how)

    run.module.forward = last  # type: ignore[method-assign]
    with pytest.raises(OptionError) as said:
        run.fit()
    assert str(said.value) == (
        "no memory is left (CUDA out of memory. Tried to allocate 2.00 GiB); lower "
        "train.batch_size (train.rows_per_step keeps the rows of a step), or set "
        f"train.activation_checkpointing=true. {tmp_path / 'checkpoint-4'} is kept."
    )


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    last = last_checkpoint(tmp_path)
    assert last is not None and last.name == "checkpoint-12"
    (last / "complete.json").unlink()
    (last / "model.safetensors").write_bytes(b"half")
    earlier = last_checkpoint(tmp_path)
    assert earlier is not None and earlier != last
    assert trainer(tmp_path).fit()["steps"] == 12
    assert last_checkpoint(tmp_path) == last
    assert trainer(tmp_path).fit()["steps"] == 12


@pytest.mark.parametrize("bound", [None, 1000.0])
def test_a_run_that_was_killed_after_its_last_step_takes_no_other(
    tmp_path: Path, bound: float | None
) -> None:
    """In the middle of an epoch, which has two steps."""
    spec = replace(SPEC, max_steps=7, max_seconds=bound)
    report = trainer(tmp_path, spec).fit()
    last = last_checkpoint(tmp_path)
    assert last is not None and last.name == "checkpoint-7"
    if bound is not None:  # its time was up then
        spent = json.loads((last / "complete.json").read_text()) | {"seconds": bound}
        (last / "complete.json").write_text(json.dumps(spent))
        spec = replace(spec, max_steps=12)
    again = trainer(tmp_path, spec)
    found = again.fit()
    assert found["steps"] == report["steps"] == 7 and last_checkpoint(tmp_path) == last
    assert found["train_loss"] == report["train_loss"] and found["tau"] == report["tau"]


def test_the_best_decoding_checkpoint_is_taken(tmp_path: Path) -> None:
    taus = iter([1.5, 2.5, 2.0])
    seen = []

    def scripted(drafter: Drafter) -> dict[str, Any]:
        seen.append(weights(drafter))
        return {"tau": next(taus), "acceptance_by_depth": [], "tree": []}

    run = trainer(tmp_path, validate=scripted)
    report = run.fit()
    assert report["best_step"] == 8 and report["tau"] == 2.5
    for name, tensor in run.module.drafter.state_dict().items():
        assert torch.equal(tensor, seen[1][name])
    assert not torch.equal(seen[1]["output"], seen[2]["output"])


def test_cached_features_train_alike(tmp_path: Path) -> None:
    found = {}
    for limit in (0.0, 1.0):
        run = trainer(tmp_path / str(limit), replace(SPEC, feature_cache_mb=limit))
        assert run.fit()["features_cached"] is (limit > 0)
        assert run.module.cache is None and not run.module.target.model._forward_hooks
        found[limit] = weights(run.module.drafter)
    for name, tensor in found[0.0].items():
        torch.testing.assert_close(found[1.0][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 4), (4, 2)])
def test_accumulation_does_not_change_the_steps(
    tmp_path: Path, batch: int, accumulation: int
) -> None:
    def train(batch: int, accumulation: int) -> tuple[float, dict[str, Tensor]]:
        spec = replace(SPEC, batch_size=batch, gradient_accumulation=accumulation, max_steps=1)
        # Rows with different numbers of labels, the case in which a mean of means is wrong.
        supervised = np.tile(np.arange(12) >= 2, (10, 1))
        supervised[::2, 6:] = False
        supervised[1] = False
        run = trainer(tmp_path / f"{batch}", spec, data=rows(supervised=supervised))
        report = run.fit()
        return report["train_loss"], weights(run.module.drafter)

    loss, reference = train(8, 1)
    split_loss, split = train(batch, accumulation)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    for name, tensor in reference.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_cache_holds_what_the_target_computes(capfd: pytest.CaptureFixture[str]) -> None:
    target = counting_target()
    drafter = fresh_drafter(target)
    module = TargetWithDrafter(target, drafter, 0.8)
    torch.nn.init.normal_(drafter.weight)  # as it starts, every token costs the same
    data = rows(20)
    assert not module.fill_cache(data, limit=0.001) and module.cache is None
    batch = torch.stack([data[i]["tokens"] for i in (3, 18)])
    supervised = torch.stack([data[i]["supervised"] for i in (3, 18)])
    online = module(torch.tensor([3, 18]), batch, supervised)["loss"]
    assert module.fill_cache(data, limit=1.0, progress=True) and module.cache is not None
    assert "features: 100% (20 texts)" in capfd.readouterr().err
    assert module.cache.shape == (20 * 12, SIZE)
    cached = module(torch.tensor([3, 18]), batch, supervised)["loss"]
    wrong_rows = module(torch.tensor([4, 18]), batch, supervised)["loss"]
    torch.testing.assert_close(cached, online)
    assert abs(wrong_rows - online) > 1e-3


def test_processes_compute_a_share_of_the_features_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes in turn, the second of which has what the first one sends, and all of it."""
    target: Any = counting_target()
    target.to(torch.bfloat16)
    data, sent = rows(40), dict[int, Tensor]()

    def filled(rank: int | None) -> tuple[Any, int]:
        def broadcast(part: Tensor, source: int) -> None:
            assert part.dtype == torch.uint8
            places.append(source)
            if source == rank:
                sent[len(places)] = part.clone()
            elif len(places) in sent:
                part.copy_(sent[len(places)])

        module: Any = TargetWithDrafter(target, fresh_drafter(target), 0.8)
        places, calls, run = list[int](), list[int](), module.features
        module.features = lambda tokens: calls.append(len(tokens)) or run(tokens)
        with monkeypatch.context() as patch:
            if rank is not None:
                patch.setattr(torch.distributed, "broadcast", broadcast)
                patch.setattr(torch.distributed, "get_rank", lambda: rank)
                patch.setattr(torch.distributed, "get_world_size", lambda: 2)
                patch.setattr(target_with_drafter, "wait_for_all", lambda: None)
                for place in (target_with_drafter, agreement):
                    patch.setattr(place, "in_parallel", lambda: True)
            assert module.fill_cache(data, limit=1.0) and module.cache is not None
        return module.cache, sum(calls)

    alone, every = filled(None)
    (_, first), (cache, second) = filled(0), filled(1)
    assert (every, first, second) == (40, 24, 16)  # batches of 16, 16 and 8 rows
    assert torch.equal(cache, alone)


def test_time_ends_training_with_the_rate_at_zero(tmp_path: Path) -> None:
    spec = replace(SPEC, max_steps=10**6, max_seconds=2.0, eval_every=None)
    run = trainer(tmp_path, spec)
    report = run.fit()
    assert 0 < report["steps"] < 10**6 and 2.0 <= report["seconds"] < 60.0
    assert report["best_step"] == report["steps"]
    assert run.lr_scheduler.get_last_lr()[0] < 0.01 * SPEC.learning_rate


def test_the_rate_follows_whichever_bound_is_nearer() -> None:
    steps = Clock(max_steps=10, max_seconds=None, warmup=0.2)
    rates = [steps.factor(step) for step in range(10)]
    assert rates[:2] == pytest.approx([0.25, 0.75]) and 0 < rates[-1] < 0.02
    assert rates[2:] == sorted(rates[2:], reverse=True)
    timed = Clock(max_steps=1000, max_seconds=50.0, warmup=0.0)
    timed.start(seconds=25.0)
    timed.read(steps=3, seconds=timed.elapsed())
    assert timed.share == pytest.approx(0.5, abs=0.01)
    assert timed.factor(3) == pytest.approx(0.5, abs=0.02)


def test_what_is_prepared_takes_time_and_no_share_of_the_training() -> None:
    clock = Clock(max_steps=1000, max_seconds=50.0, warmup=0.2)
    clock.prepared = 30.0
    clock.read(steps=1, seconds=31.0)
    assert clock.share == pytest.approx(0.05) and clock.factor(1) == pytest.approx(0.25)
    clock.read(steps=20, seconds=50.0)
    assert clock.share == 1.0
    late = Clock(max_steps=1000, max_seconds=20.0, warmup=0.2)
    late.prepared = 30.0
    late.read(steps=1, seconds=31.0)
    assert late.share == 1.0


@pytest.mark.parametrize(("bound", "said"), [(50.0, True), (60.0, False), (None, False)])
def test_little_time_left_for_steps_is_said(bound: float | None, said: bool) -> None:
    clock = Clock(max_steps=1000, max_seconds=bound, warmup=0.2)
    clock.prepared = 30.0
    found = clock.little_left()
    assert found.startswith("30 of train.max_seconds' 50 seconds") if said else found == ""


def test_a_resumed_run_goes_on_at_the_share_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, now, passed = TargetWithDrafter.fill_cache, time.perf_counter, 0.0

    def slow(self: TargetWithDrafter, *args: Any) -> bool:
        nonlocal passed
        passed += 600.0
        return fill(self, *args)

    monkeypatch.setattr(TargetWithDrafter, "fill_cache", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now() + passed)
    spec = replace(SPEC, max_seconds=1000.0, eval_every=4)
    first = trainer(tmp_path, spec)
    first.fit()
    assert 600 <= first.clock.prepared < first.clock.seconds < 800
    again = trainer(tmp_path, replace(spec, max_steps=16))
    again.fit()  # its features again are of no time of training
    assert again.clock.prepared == first.clock.prepared
    assert first.clock.seconds < again.clock.seconds < 800 and again.state.global_step == 16


def test_time_already_trained_counts_after_a_resume(tmp_path: Path) -> None:
    spec = replace(SPEC, max_seconds=1000.0, eval_every=4)
    trainer(tmp_path, spec).fit()
    last = last_checkpoint(tmp_path)
    assert last is not None
    spent = json.loads((last / "complete.json").read_text())
    spent["seconds"] += 900.0
    (last / "complete.json").write_text(json.dumps(spent))
    longer = trainer(tmp_path, replace(spec, max_steps=16))
    assert longer.fit()["seconds"] > 900


KILLED = """
import sys, time
from pathlib import Path
from tests.train.fit import test_trainer
from headstart.train.fit.trainer import DrafterTrainer
save = DrafterTrainer._save_checkpoint
def slow(self, *args):
    save(self, *args)
    if self.state.global_step == 4:
        print("saved", flush=True)
        time.sleep(60)
DrafterTrainer._save_checkpoint = slow
test_trainer.trainer(Path(sys.argv[1])).fit()
"""


def test_sigkill_then_resume_is_bit_exact(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut")],
        stdout=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "saved\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["checkpoint-4"]
    trainer(tmp_path / "cut").fit()
    trainer(tmp_path / "whole").fit()
    check_same_checkpoints(tmp_path, "model.safetensors")


@pytest.mark.parametrize("loss", ["soft_cross_entropy", "forward_kl", "acceptance"])
def test_the_targets_distribution_teaches_to_count(tmp_path: Path, loss: str) -> None:
    """It is almost sure of what it writes. The other losses hardly have a gradient from afar."""
    target = counting_target()
    with torch.no_grad():
        target.lm_head.weight.mul_(4)
    spec = replace(SPEC, loss=loss, max_steps=60, eval_every=None)
    run = trainer(tmp_path, spec, drafter=fresh_drafter(target))
    assert run.fit()["tau"] == pytest.approx(33 / 12)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_teacher_reads_the_final_feature(tmp_path: Path, limit: float) -> None:
    """Whether the drafter reads it or not, and whether it is cached or not."""
    spec = replace(SPEC, loss="forward_kl", feature_cache_mb=limit, max_steps=4, eval_every=None)
    losses = []
    for layers in ([1], [1, -1], [-1]):
        torch.manual_seed(0)
        target = random_target()
        config = BigramConfig.for_target(target)
        config.feature_layers = layers
        run = trainer(tmp_path / str(layers), spec, lambda _: IDLE, Bigram(config).bind(target))
        report = run.fit()
        assert report["features_cached"] is (limit > 0)
        losses.append(report["train_loss"])
    assert losses == pytest.approx([losses[0]] * 3) and losses[0] > 1e-3


def random_target() -> Any:
    return LlamaForCausalLM(counting_target().config).eval()


def norms_that_stayed(drafter: Drafter, before: dict[str, Tensor]) -> list[str]:
    """The norms' weights that training has not moved."""
    norms = [name for name, m in drafter.named_modules() if "norm" in type(m).__name__.lower()]
    now = drafter.state_dict()
    named = [name for name in now if name.rpartition(".")[0] in norms]
    return [name for name in named if torch.equal(now[name], before[name])]


@pytest.mark.parametrize(
    ("family", "options", "norms"),
    [
        ("medusa", {"heads": 2, "output": "own"}, 0),
        ("medusa2", {"heads": 2, "output": "own"}, 0),
        ("redrafter", {"depths": 2}, 0),
        ("mlp_speculator", {"heads": 2}, 0),
        ("mlp_speculator", {"heads": 2, "cell": "lstm"}, 0),
        ("hydra", {"heads": 2, "layers": 2, "output": "own", "prefix": True}, 3),
        ("eagle", {"depths": 2}, 1),
        ("eagle3", {"depths": 2}, 4),
        ("draft_model", {"layers": 2}, 5),
    ],
)
def test_every_weight_moves_and_is_kept_in_float32(
    tmp_path: Path, family: str, options: dict[str, Any], norms: int
) -> None:
    drafter = drafter_of(random_target(), family, **options)
    before = weights(drafter)
    assert sum("norm" in name for name in before) == norms
    spec = replace(SPEC, learning_rate=1e-4, eval_every=None)
    run = trainer(tmp_path, spec, lambda _: IDLE, drafter)
    run.fit()
    assert not norms_that_stayed(drafter, before)
    for name, tensor in drafter.state_dict().items():
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, before[name]), name
    for state in run.optimizer.state.values():  # type: ignore[union-attr]
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_positions_are_weighted_by_acceptance() -> None:
    """The weights of a single depth are between 0.1 and 1."""
    drafter = drafter_of(random_target(), "medusa", heads=1)
    batch = torch.arange(2), counting_rows(2, 12), torch.ones(2, 12, dtype=torch.bool)
    plain, weighted = (
        TargetWithDrafter(drafter.target, drafter, 1.0, weights=w)(*batch)["loss"]
        for w in ("none", "acceptance")
    )
    assert 0.1 * plain < weighted < plain


def test_features_are_compared_where_they_are_predicted() -> None:
    drafter = drafter_of(random_target(), "eagle", depths=2)
    batch = torch.arange(2), counting_rows(2, 12), torch.ones(2, 12, dtype=torch.bool)
    losses = [
        TargetWithDrafter(drafter.target, drafter, 1.0, feature_weight=w)(*batch)["loss"]
        for w in (0.0, 1.0, 3.0)
    ]
    assert losses[1] > losses[0]
    torch.testing.assert_close(losses[2] - losses[0], 3 * (losses[1] - losses[0]))
    for name in ("eagle3", "medusa"):
        other = drafter_of(random_target(), name)
        with pytest.raises(OptionError, match=r"feature_weight is 1.0, but .* predicts no"):
            TargetWithDrafter(other.target, other, 1.0, feature_weight=1.0)


def test_norms_in_bfloat16_stay_where_they_are(tmp_path: Path) -> None:
    """What float32 is for: next to 1, bfloat16 has no number within a small step's reach."""
    drafter = drafter_of(random_target(), "draft_model", layers=2).bfloat16()
    before = weights(drafter)
    spec = replace(SPEC, learning_rate=1e-4, eval_every=None)
    trainer(tmp_path, spec, lambda _: IDLE, drafter).fit()
    assert len(norms_that_stayed(drafter, before)) == 5


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_autocast_leaves_weights_and_features_alone(tmp_path: Path, loss: str) -> None:
    spec = replace(SPEC, loss=loss, feature_cache_mb=0.0, eval_every=None)
    run = trainer(tmp_path, spec, bf16=True)
    seen = set()
    states = run.module.drafter.draft_hidden_states

    def watched(features: Tensor, *others: Any) -> Tensor:
        seen.add((features.dtype, torch.is_autocast_enabled("cpu")))
        return states(features, *others)

    run.module.drafter.draft_hidden_states = watched  # type: ignore[method-assign]
    run.fit()
    assert seen == {(torch.float32, True)}
    assert all(p.dtype == torch.float32 for p in run.module.drafter.parameters())


def test_a_drafter_without_training_is_refused() -> None:
    class Untaught(Bigram):
        trainable = False

    target = counting_target()
    with pytest.raises(OptionError, match="nothing to train"):
        TargetWithDrafter(target, Untaught(BigramConfig.for_target(target)).bind(target), 0.8)


class BigramConfig(DrafterConfig):
    """What follows a token, whatever came before it; no feature of the target is read."""

    model_type = "headstart_bigram"
    feature_layers: Any = ()


class Bigram(TrainableDrafter):
    """A family in one class: a table of logits, from token to token."""

    config_class = BigramConfig

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size))
        self.post_init()

    @property
    def train_depths(self) -> int:
        return 1

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        return Step(self.table[last_true(tokens.unsqueeze(-1), count)])

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        return Step(self.table[tokens])

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int, positions: Any = None
    ) -> Tensor:
        return torch.stack([tokens.roll(-depth, 1)[where] for depth in range(1, depths + 1)])

    def draft_logits(self, depth: int) -> Any:
        return lambda states: self.table[states]


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_a_family_takes_one_class_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """From recipe to tokens: trained, validated on a tree it gets itself, saved, loaded, exact."""
    monkeypatch.setitem(FAMILIES, "bigram", Family("bigram", f"{__name__}:Bigram"))  # the line
    target = counting_target()
    with torch.no_grad():
        target.lm_head.weight.mul_(4)
    drafter = drafter_of(target, "bigram")
    spec = replace(SPEC, loss=loss, learning_rate=1.0, max_steps=20, eval_every=None)
    check = Validation(target, prompts(), 13, "sparse:4", "greedy")
    report = trainer(tmp_path / "checkpoints", spec, check, drafter).fit()
    assert report["tau"] == 4.0 and report["tree"] == [[0], [0, 0], [0, 0, 0]]
    manifest = Manifest("bigram", "counting", fingerprint(target))
    folder = save_drafter(drafter, tmp_path / "artifact", manifest)
    loaded = load_drafter(folder, target)
    assert type(loaded) is Bigram
    assert measure_tau(target, loaded, StaticTree.chain(3), "greedy", prompts(), 13)["tau"] == 4.0
