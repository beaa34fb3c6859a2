"""Heads and target trained jointly: who learns when, what is kept, resumed, measured and loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import headstart
from headstart.heads import Drafter, load_drafter
from headstart.heads.artifacts.manifest import read_manifest
from headstart.heads.declared.adapter import ADAPTER_WEIGHTS
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.medusa2 import Medusa2, Medusa2Config
from headstart.infer import StaticTree, parse_static
from headstart.train import drafter_stage, pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts, held_out_texts
from headstart.train.data.training_rows import Rows
from headstart.train.fit.clock import Clock
from headstart.train.fit.joint import (
    JointTarget,
    JointTrainer,
    adapter_loss_change,
    base_kl,
    drafter_weight,
    text_loss,
)
from headstart.train.fit.validate import Validation, measure_tau
from headstart.train.losses.divergences import forward_kl
from headstart.train.recipe import Chat, Train, load_recipe
from headstart.train.stages.kept import continue_from
from tests.support.counting import SIZE, counting_rows, counting_target
from tests.support.recipes import TINY
from tests.support.training import check_same_checkpoints, killed_and_resumed, rows, trainer_of

SPEC = Train(learning_rate=1e-2, batch_size=4, max_steps=12, eval_every=4)


def target() -> Any:
    """Random, but the same at every call."""
    torch.manual_seed(1)
    return LlamaForCausalLM(counting_target().config).eval()


def medusa2(model: Any, **options: Any) -> Medusa2:
    options = {"heads": 2, "output": "own", "rank": 4, "heads_first": 0.0, **options}
    drafter = Medusa2(Medusa2Config.for_target(model, **options)).bind(model)
    drafter.init_from_target()
    return drafter


def validate(drafter: Drafter) -> dict[str, Any]:
    prompts = list(counting_rows(3, 4))
    return measure_tau(drafter.target, drafter, StaticTree.chain(2), "greedy", prompts, 12)


def trainer(
    folder: Path,
    spec: Train = SPEC,
    check: Callable[..., Any] = validate,
    data: Rows | None = None,
    **options: Any,
) -> JointTrainer:
    run = trainer_of(medusa2(target(), **options), folder, spec, check, data)
    assert isinstance(run, JointTrainer)
    return run


def batch() -> dict[str, Tensor]:
    tokens = counting_rows(4, 12)
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    supervised[:, :3] = False
    supervised[0, 8:] = False
    return {"rows": torch.arange(4), "tokens": tokens, "supervised": supervised}


def weights(run: JointTrainer) -> dict[str, Tensor]:
    """Those of the heads and of the adapter."""
    found = {name: tensor.clone() for name, tensor in run.module.drafter.state_dict().items()}
    factors = run.module.adapter.parameters()
    return found | {f"adapter {i}": p.detach().clone() for i, p in enumerate(factors)}


def disturb(module: JointTarget, scale: float = 0.3) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in module.adapter.parameters():
            parameter.normal_(0, scale)


# The loss.


@pytest.mark.parametrize("modules", [[], ["v_proj", "lm_head"]])
def test_the_targets_own_loss_is_the_divergence_from_itself_without_adapter(
    modules: list[str],
) -> None:
    model, data = target(), batch()
    with torch.no_grad():
        base = model(data["tokens"]).logits.log_softmax(-1)
    module = JointTarget(model, medusa2(model, modules=modules), 0.8)
    assert module(**data, weight=0.0)["loss"].item() == pytest.approx(0.0, abs=2e-6)
    disturb(module)
    with torch.no_grad():
        adapted = model(data["tokens"]).logits.log_softmax(-1)
        loss = module(**data, weight=0.0)["loss"].item()
    # Position t says what x_t+1 may be, and is compared where that is supervised.
    where = functional.pad(data["supervised"][:, 1:], (0, 1))
    expected = forward_kl(base[where], adapted[where]).mean().item()
    assert loss == pytest.approx(expected, rel=1e-4) and loss > 1e-3
    late = forward_kl(base[data["supervised"]], adapted[data["supervised"]]).mean().item()
    assert abs(late - expected) > 1e-5, "the control: a mask that is one position off"
    assert forward_kl(adapted[where], base[where]).mean().item() != pytest.approx(loss, rel=1e-3)


def test_the_divergence_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its gradient, and with dropout before the output layer, which is run twice then."""
    model = target()
    module = JointTarget(model, medusa2(model, modules=["lm_head"], dropout=0.5), 0.8).train()
    disturb(module)
    teacher = module.base
    base, adapted = torch.randn(9, SIZE), torch.randn(9, SIZE, requires_grad=True)
    found = []
    for size in (None, 3):
        for drop in (False, True):
            module.adapter.train(drop)
            torch.manual_seed(0)
            layer = model.get_output_embeddings()
            loss = base_kl(teacher, layer, base, adapted, torch.tensor(9), size)
            found.append((loss, torch.autograd.grad(loss, adapted)[0]))
    (whole, slope), _, (parts, same), (_, dropped) = found
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(same, slope)
    # What is computed again must draw what was drawn: a gradient check by differences.
    layer = model.get_output_embeddings()
    with torch.no_grad():
        nudge, values = torch.randn_like(adapted), []
        for sign in (1, -1):
            torch.manual_seed(0)
            moved = adapted + sign * 1e-2 * nudge
            values.append(base_kl(teacher, layer, base, moved, torch.tensor(9), 3))
        by_differences = (values[0] - values[1]) / 2e-2
    torch.testing.assert_close(by_differences, (dropped * nudge).sum(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_heads_read_the_adapted_feature(limit: float) -> None:
    """Cached features are the base's, which the divergence alone may read."""
    model, data = target(), batch()
    drafter = medusa2(model)
    module = JointTarget(model, drafter, 0.8)
    assert module.fill_cache(rows(4), limit) == (limit > 0)
    disturb(module)
    alone = module(**data)["loss"]
    joint = module(**data, weight=2.0)["loss"] - module(**data, weight=1.0)["loss"]
    assert abs(joint - alone) > 1e-3
    with drafter.adapter.disabled():  # type: ignore[union-attr]
        plain = module(**data, weight=2.0)["loss"] - module(**data, weight=1.0)["loss"]
    torch.testing.assert_close(plain, alone, rtol=1e-4, atol=1e-4)


def test_heads_alone_do_not_reach_the_adapter() -> None:
    model, data = target(), batch()
    module = JointTarget(model, medusa2(model), 0.8)
    disturb(module)
    factors = module.adapter.parameters()
    module(**data)["loss"].backward()
    assert all(p.grad is None for p in factors)
    module(**data, weight=0.5)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in factors)
    frozen = [p for p in model.parameters() if not any(p is f for f in factors)]
    assert frozen and not any(p.requires_grad for p in frozen)


# Training.


@pytest.mark.parametrize("shares", [[1.0], [0.25, 0.75]])
def test_what_its_stages_compute(shares: list[float]) -> None:
    """Only the last one reaches the adapter."""
    model = target()
    module = JointTarget(model, medusa2(model, heads_first=1 - shares[-1]), 0.8)
    assert [share for share, _ in module.stages()] == shares
    for _, options in module.stages():
        assert not any(p.grad is not None and p.grad.any() for p in module.adapter.parameters())
        module(**batch(), **options)["loss"].backward()
    assert any(p.grad is not None and p.grad.any() for p in module.adapter.parameters())


def test_heads_and_adapter_move_and_the_base_does_not(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    before, base, ids = weights(run), target(), batch()["tokens"]
    report = run.fit()
    assert report["steps"] == 12
    for name, tensor in weights(run).items():
        assert not torch.equal(tensor, before[name]), name
    model, adapter = run.module.target, run.module.adapter
    assert adapter is not None
    with torch.no_grad():
        expected = base(ids).logits
        assert not torch.equal(model(ids).logits, expected)
        with adapter.disabled():
            assert torch.equal(model(ids).logits, expected)
    adapter.detach()
    mine, own = model.state_dict(), base.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in own.items())


def test_the_adapter_waits_for_its_stage(tmp_path: Path) -> None:
    """With `heads_first` 0.5 of 12 steps, its first is the seventh."""
    seen, rates = [], []

    def watched(drafter: Drafter) -> dict[str, Any]:
        assert drafter.adapter is not None
        seen.append([p.detach().clone() for p in drafter.adapter.parameters()])
        return validate(drafter)

    spec = replace(SPEC, eval_every=6, learning_rate=1e-3)
    run = trainer(tmp_path, spec, watched, heads_first=0.5, head_rate=8.0)
    start = weights(run)
    step, weighed = run.compute_loss, []
    forward = run.module.forward

    def noted(*args: Any, **how: Any) -> Any:
        groups: Any = run.optimizer.param_groups  # type: ignore[union-attr]
        rates.append({group["adapter"]: group["lr"] for group in groups})
        return step(*args, **how)

    def weigh(*args: Any, weight: float | None = None, **how: Any) -> Any:
        weighed.append(weight)
        return forward(*args, weight=weight, **how)

    run.compute_loss = noted  # type: ignore[method-assign]
    run.module.forward = weigh  # type: ignore[method-assign]
    run.fit()
    assert all(torch.equal(p, start[f"adapter {i}"]) for i, p in enumerate(seen[0]))
    assert all(not torch.equal(p, start[f"adapter {i}"]) for i, p in enumerate(seen[1]))
    assert weighed == [None] * 6 + [0.2] * 6
    heads, adapter = ([rate[adapted] for rate in rates] for adapted in (False, True))
    assert not any(adapter[:6]) and all(rate > 0 for rate in (*heads, *adapter[6:]))
    # Each rises and falls over its own stage; the middle of a stage is past its rise.
    assert max(heads) == pytest.approx(8e-3, rel=0.05) and max(adapter) <= 1e-3
    assert max(adapter) > 8e-4


def test_heads_alone_learn_as_medusas_do(tmp_path: Path) -> None:
    """With the same rate and rows the weights are the same, and the adapter is as it was."""
    model = target()
    medusa = Medusa(MedusaConfig.for_target(model, heads=2, output="own")).bind(model)
    medusa.init_from_target()
    trainer_of(medusa, tmp_path / "medusa", SPEC, validate).fit()
    slower = replace(SPEC, learning_rate=SPEC.learning_rate / 4)
    run = trainer(tmp_path / "medusa2", slower, heads_first=1 - 1e-9)
    start = weights(run)
    run.fit()
    found = weights(run)
    for name, tensor in medusa.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
        assert not torch.equal(tensor, start[name])
    assert all(
        torch.equal(found[name], start[name]) for name in found if name not in medusa.state_dict()
    )


@pytest.mark.parametrize("parallel", [False, True])
def test_adam_counts_no_step_while_the_adapter_waits(
    parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data-parallel training gives an adapter that waits gradients of zero, which do not count."""
    monkeypatch.setattr("headstart.train.fit.joint.in_parallel", lambda: parallel)
    run = trainer(tmp_path, heads_first=0.5)
    run.fit()
    state = run.optimizer.state  # type: ignore[union-attr]
    factors = run.module.adapter.parameters()
    assert {int(state[p]["step"]) for p in run.module.drafter.parameters()} == {12}
    assert {int(state[p]["step"]) for p in factors} == {6}


def test_a_sine_ramp_reaches_the_weight_at_the_end(tmp_path: Path) -> None:
    run = trainer(tmp_path, ramp="sine", head_weight=0.5)
    weighed, forward = [], run.module.forward

    def weigh(*args: Any, weight: float | None = None, **how: Any) -> Any:
        weighed.append(weight)
        return forward(*args, weight=weight, **how)

    run.module.forward = weigh  # type: ignore[method-assign]
    run.fit()
    assert weighed == sorted(weighed) and 0 < weighed[0] < 0.04 and weighed[-1] > 0.49


@pytest.mark.parametrize(("size", "accumulation"), [(2, 4), (4, 2)])
def test_accumulation_does_not_change_the_steps(
    size: int, accumulation: int, tmp_path: Path
) -> None:
    found = []
    for each, times in ((8, 1), (size, accumulation)):
        spec = replace(SPEC, batch_size=each, gradient_accumulation=times, max_steps=2)
        supervised = np.tile(np.arange(12) >= 2, (10, 1))
        supervised[::2, 6:] = False
        run = trainer(tmp_path / f"{each}", spec, data=rows(supervised=supervised), dropout=0.0)
        run.fit()
        found.append(weights(run))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Dropout, the ramp and both stages included."""
    options: dict[str, Any] = {"heads_first": 0.4, "ramp": "sine", "dropout": 0.2}
    report, resumed = killed_and_resumed(
        lambda folder, check: trainer(folder, check=check, **options), validate, tmp_path
    )
    assert resumed["tau"] == report["tau"]
    check_same_checkpoints(tmp_path, "model.safetensors", ADAPTER_WEIGHTS, "optimizer.pt")


OFTEN = replace(SPEC, eval_every=2)


def extended(folder: Path, check: Callable[..., Any], short: Path, **options: Any) -> JointTrainer:
    """A run of 12 steps that goes on after those of `short`."""
    continue_from(short, folder)
    return trainer(folder, OFTEN, check, **options)


@pytest.mark.parametrize("bound", [None, 3600.0])
def test_a_longer_training_stays_in_the_second_stage(tmp_path: Path, bound: float | None) -> None:
    """The adapter learnt in steps 3 and 4 of 4, the first of which is at 2.5 of 12 steps."""
    options: dict[str, Any] = {"heads_first": 0.5, "ramp": "sine", "head_weight": 0.5}
    short = tmp_path / "short" / "checkpoints"
    trainer(short, replace(OFTEN, max_steps=4, max_seconds=bound), **options).fit()
    run = extended(tmp_path / "long", validate, short, **options)
    weighed, rates, forward = [], [], run.module.forward

    def weigh(*args: Any, weight: float | None = None, **how: Any) -> Any:
        groups: Any = run.optimizer.param_groups  # type: ignore[union-attr]
        rates.append(next(group["lr"] for group in groups if group["adapter"]))
        weighed.append(weight)
        return forward(*args, weight=weight, **how)

    run.module.forward = weigh  # type: ignore[method-assign]
    run.fit()
    config, since = run.module.drafter.config, 2.5 / 12
    assert len(weighed) == 8 and drafter_weight(config, 4.5 / 12) is None, "what it would be"
    assert weighed == [drafter_weight(config, (n + 0.5) / 12, since) for n in range(4, 12)]
    assert weighed == sorted(weighed) and rates[0] > rates[-1] > 0
    assert rates == sorted(rates, reverse=True)
    state = run.optimizer.state  # type: ignore[union-attr]
    assert {int(state[p]["step"]) for p in run.module.adapter.parameters()} == {10}


def test_a_longer_training_that_is_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"heads_first": 0.5, "ramp": "sine", "dropout": 0.2}
    short = tmp_path / "short" / "checkpoints"
    trainer(short, replace(OFTEN, max_steps=4), **options).fit()
    report, resumed = killed_and_resumed(
        lambda folder, check: extended(folder, check, short, **options), validate, tmp_path
    )
    assert resumed["tau"] == report["tau"]
    check_same_checkpoints(tmp_path, "model.safetensors", ADAPTER_WEIGHTS, "optimizer.pt")


@pytest.mark.parametrize("first", [0.4, 0.45, 0.6])
def test_a_second_stage_that_a_schedule_began_itself_is_where_it_says(first: float) -> None:
    """By steps and by time, whichever is further: a run that is resumed has the same schedule."""
    for seconds in (None, 100.0):
        clock = Clock(10, seconds, 0.1)
        clock.prepared = 7.0
        for step in range(10):
            clock.read(step, 7.0 + 12.0 * step)
            if clock.at(step) >= first:
                assert clock.at(step, clock.seconds) == clock.at(step) >= first


def test_the_best_checkpoint_has_its_own_adapter(tmp_path: Path) -> None:
    taus, seen = iter([1.5, 2.5, 2.0]), []
    run: Any = None

    def scripted(drafter: Drafter) -> dict[str, Any]:
        seen.append(weights(run))
        return {"tau": next(taus), "acceptance_by_depth": [], "tree": []}

    run = trainer(tmp_path, check=scripted)
    assert run.fit()["best_step"] == 8
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, seen[1][name]) and not torch.equal(tensor, seen[2][name])


# What is said of it.


def test_held_out_loss_is_that_of_the_text(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    texts = list(counting_rows(20, 10))
    base, adapter = target(), run.module.adapter
    assert adapter is not None
    disturb(run.module)
    found = adapter_loss_change(run.module.target, adapter, texts)  # type: ignore[arg-type]
    stacked = torch.stack(texts)
    for name, model in (("base", base), ("adapted", run.module.target)):
        with torch.no_grad():
            loss = model(stacked, labels=stacked).loss.item()
        assert found[name] == pytest.approx(loss, rel=1e-5)
    assert found["tokens"] == 180 and found["adapted"] != pytest.approx(found["base"], rel=1e-4)
    assert found["base"] == text_loss(base, texts)


def test_the_tree_is_chosen_on_what_the_adapted_target_writes() -> None:
    """Its text is not that of the validation before."""
    model = target()
    drafter = medusa2(model)
    module = JointTarget(model, drafter, 0.8)
    prompts = list(counting_rows(3, 4))
    check = Validation(model, prompts, 8, "sparse:4", "greedy")
    check(drafter.eval())
    before = check._texts
    disturb(module)
    check(drafter)
    assert before is not None and check._texts is not None and before is not check._texts


def recipe(tmp_path: Path, **sections: Any) -> Any:
    drafter = {"family": "medusa2", "heads": 2, "rank": 4, "head_weight": 1.0}
    data = TINY | {"output": str(tmp_path / "runs"), "drafter": drafter} | sections
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(data))
    # One checkpoint: an earlier one may decode best, from before the adapter has learned.
    return load_recipe(tmp_path / "r.yaml", ["train.learning_rate=3e-2", "train.eval_every=null"])


@pytest.mark.usefixtures("no_pictures")
def test_from_recipe_to_tokens(tmp_path: Path) -> None:
    plain = TINY["distill"] | {"chat": "plain"}
    with mock.patch.object(drafter_stage, "held_out_texts", wraps=held_out_texts) as asked:
        report = pipeline.run(recipe(tmp_path, distill=plain, chat={"system": "x"}))
    assert report["identical_to_plain"]
    assert asked.call_args.args[-2:] == ("plain", Chat(system="x"))
    folder = Path(report["artifact"])
    manifest = read_manifest(folder)
    moved = manifest.metrics["held_out_loss"]
    assert moved["base"] != moved["adapted"] and moved["tokens"] > 0
    card = (folder / "README.md").read_text()
    assert "adapted target" in card and f"{moved['adapted']:.4f}" in card
    assert "the target's own" not in card

    base: Any = AutoModelForCausalLM.from_pretrained(manifest.target)
    tokenizer = AutoTokenizer.from_pretrained(manifest.target)
    documents = load_documents(folder.parent / "corpus", "held_out")
    texts = held_out_texts(tokenizer, documents, 16)
    assert text_loss(base, texts) == pytest.approx(moved["base"], rel=1e-6)
    drafter = load_drafter(folder, base, tokenizer)
    assert text_loss(base, texts) == pytest.approx(moved["adapted"], rel=1e-4)
    tree = parse_static(str(folder / "tree.json"))
    prompts = held_out_prompts(tokenizer, documents, 2, 16, 0, part="validation")
    measured = measure_tau(base, drafter, tree, "greedy", prompts, 16)
    assert measured["tau"] == pytest.approx(manifest.metrics["tau"])
    speculator = headstart.load(manifest.target, folder)
    prompt = prompts[0].tokens[None]
    found = speculator.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, base.generate(prompt, max_new_tokens=12, do_sample=False))
