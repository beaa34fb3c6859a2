"""Training that ends early, on signals or at a loss that is not finite, and what goes on then."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.fit.checkpoints import last_checkpoint
from headstart.train.fit.non_finite import NonFiniteLoss
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.processes.stopping import Interrupted
from headstart.train.recipe import Train
from tests.support.counting import counting_target
from tests.support.training import (
    IDLE,
    check_same_checkpoints,
    drafter_of,
    trainer_of,
)

SPEC = Train(learning_rate=3e-2, batch_size=4, max_steps=12, eval_every=4)


def trainer(folder: Path, spec: Train = SPEC) -> DrafterTrainer:
    torch.manual_seed(7)
    drafter = drafter_of(counting_target(), "medusa", heads=2, output="own")
    return trainer_of(drafter, folder, spec, lambda _: IDLE)


def in_step(run: DrafterTrainer, act: Any) -> None:
    draft_loss = run.module.draft_loss

    def watched(*args: Any) -> Any:
        if run.state.global_step == 5:
            act()
        return draft_loss(*args)

    run.module.draft_loss = watched  # type: ignore[method-assign]


def in_validation(run: DrafterTrainer, act: Any) -> None:
    validate = run.validation

    def watched(drafter: Any) -> Any:
        act()
        return validate(drafter)

    run.validation = watched


def in_loader(run: DrafterTrainer, act: Any) -> None:
    batches = run.get_batch_samples

    def watched(*args: Any) -> Any:
        found = batches(*args)
        if run.state.global_step == 5:
            act()
        return found

    run.get_batch_samples = watched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the report of a run that nothing ends early."""
    folder = tmp_path_factory.mktemp("stopping") / "whole"
    return folder, trainer(folder).fit()


@pytest.mark.parametrize(("place", "step"), [(in_step, 6), (in_validation, 5), (in_loader, 6)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_and_nothing_is_lost(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]], place: Any, step: int,
    number: signal.Signals,
) -> None:  # fmt: skip
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    cut = trainer(tmp_path / "cut")
    place(cut, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted) as stopped:
        cut.fit()
    assert stopped.value.code == 128 + number
    last = last_checkpoint(tmp_path / "cut")
    assert last is not None and last.name == f"checkpoint-{step}"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before

    resumed = trainer(tmp_path / "cut").fit()
    folder, report = whole
    (tmp_path / "whole").symlink_to(folder)
    check_same_checkpoints(tmp_path, "model.safetensors", "optimizer.pt")
    assert resumed["train_loss"] == report["train_loss"] and resumed["steps"] == 12


def test_a_loss_that_is_not_finite_stops_within_the_step(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def plant(drafter: Any) -> dict[str, Any]:
        assert run.module.cache is not None
        run.module.cache[run.module.starts[3] + 2] = torch.nan
        return IDLE

    run.validation = plant
    with pytest.raises(NonFiniteLoss, match=r"step [5-8]: the loss of training row 3 is not") as no:
        run.fit()
    assert "checkpoint-4 is kept" in str(no.value)
    last = last_checkpoint(tmp_path)
    assert last is not None and last.name == "checkpoint-4"
    assert trainer(tmp_path).fit()["steps"] == 12  # the rows are sound again


def test_weights_that_are_not_finite_are_named_and_never_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def plant(drafter: Any) -> dict[str, Any]:
        drafter.weight.data[0, 0, 0] = torch.inf
        return IDLE

    run.validation = plant
    with pytest.raises(NonFiniteLoss, match="weights are not finite; lower"):
        run.fit()
    assert last_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 2}, "batch size 4, and this run has 2"),
        ({"gradient_accumulation": 2}, "gradient accumulation 1, and this run has 2"),
    ],
)
def test_a_run_goes_on_only_with_the_same_batches(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    trainer(tmp_path).fit()
    with pytest.raises(OptionError, match=words):
        trainer(tmp_path, replace(SPEC, **changed)).fit()


def test_checkpoints_that_are_not_whole_are_removed(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    half = tmp_path / "checkpoint-40"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    trainer(tmp_path).fit()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-12", "checkpoint-4"]  # the last, and the first of equals


def test_the_seed_alone_decides_a_new_drafter() -> None:
    target, drafters = counting_target(), []
    for draws in (0, 5):
        torch.manual_seed(11)
        torch.rand(draws)
        state = torch.get_rng_state()
        drafters.append(drafter_of(target, "redrafter", depths=2).state_dict())
        assert torch.equal(torch.get_rng_state(), state)
    one, two = drafters
    assert one and all(torch.equal(tensor, two[name]) for name, tensor in one.items())
