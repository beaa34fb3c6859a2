"""Epochs, and runs that go on within one: exactly, and without reading what was trained on."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.data.training_rows import Rows
from headstart.train.fit import epochs
from headstart.train.fit.epochs import steps_of
from tests.support.ragged_run import (
    COUNT,
    cut_in_two,
    ragged_rows,
    ragged_trainer,
    run_in_two_processes,
)
from tests.support.training import IDLE, check_same_checkpoints, tensors

FILES = ("model.safetensors", "optimizer.pt")


@pytest.mark.parametrize(
    "train",
    [
        {"dataloader_workers": 2, "gradient_accumulation": 2, "feature_cache_mb": 0.0},
        {"group_by_length": False},
        {"packing": True, "dataloader_workers": 1, "gradient_accumulation": 2},
    ],
    ids=["grouped", "in any order", "packed"],
)
def test_a_run_resumed_within_an_epoch_ends_with_the_same_weights(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    rows = ragged_rows(tmp_path / "rows")
    steps = ragged_trainer(tmp_path / "none", lambda _: IDLE, rows, **train).batches.steps
    assert 8 % steps  # the checkpoint from which the run goes on is within an epoch
    cut_in_two(tmp_path, rows, **train)
    check_same_checkpoints(tmp_path, *FILES)


def test_workers_change_nothing(tmp_path: Path) -> None:
    rows, found = ragged_rows(tmp_path / "rows"), []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        how: dict[str, Any] = {"eval_every": None, "dataloader_workers": workers}
        ragged_trainer(folder, lambda _: IDLE, rows, **how).fit()
        found.append(tensors(folder / "checkpoint-12" / "model.safetensors"))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_rows_that_were_trained_on_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = ragged_rows(tmp_path / "rows"), []
    item = Rows.__getitem__
    monkeypatch.setattr(
        Rows, "__getitem__", lambda self, number: (read.append(number), item(self, number))[1]
    )
    how: dict[str, Any] = {"feature_cache_mb": 0.0}
    ragged_trainer(tmp_path / "run", lambda _: IDLE, rows, **how).fit()
    # Nine steps an epoch: eight of three rows, and one of one row.
    assert len(read) == COUNT + 3 * 3 and sorted(read[:COUNT]) == list(range(COUNT))
    whole = read.copy()
    for name in ("complete.json", "model.safetensors"):
        (tmp_path / "run" / "checkpoint-12" / name).unlink()
    read.clear()
    ragged_trainer(tmp_path / "run", lambda _: IDLE, rows, **how).fit()  # from the best, step 4
    assert read == whole[4 * 3 :]
    read.clear()
    ragged_trainer(tmp_path / "run", lambda _: IDLE, rows, max_steps=16, **how).fit()
    assert len(read) == 4 * 3 and not set(read) & set(whole[COUNT:])


def test_epochs_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = ragged_rows(tmp_path / "rows")
    how: dict[str, Any] = {"eval_every": None, "epochs": 1.5}
    run = ragged_trainer(tmp_path / "short", lambda _: IDLE, rows, **how, max_steps=100)
    assert run.batches.steps == 9 and run.fit()["steps"] == 14
    assert run.lr_scheduler.get_last_lr()[0] < 1e-3 * 1e-2  # the rate ends there, too
    assert not caplog.records
    run = ragged_trainer(tmp_path / "cut", lambda _: IDLE, rows, **how, max_steps=4)
    assert run.fit()["steps"] == 4
    assert "train.max_steps 4 ends training after 0.44 of 1.5 epochs" in caplog.text


def test_a_short_training_tells_its_loss(tmp_path: Path) -> None:
    rows = ragged_rows(tmp_path / "rows")
    how: dict[str, Any] = {"eval_every": None, "max_steps": 1_000_000}
    for name, bound, steps in (("epochs", 1.5, 14), ("max_seconds", 1e-9, 1)):
        run = ragged_trainer(tmp_path / name / "run", lambda _: IDLE, rows, **how, **{name: bound})
        assert run.fit()["steps"] == steps
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))


def test_so_many_steps_make_so_many_epochs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [steps_of(epochs, 7, 100) for epochs in (0.1, 1.0, 2.5)] == [1, 7, 18]
    assert not caplog.records


def test_rows_are_packed_only_where_they_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ragged_rows(tmp_path / "rows")

    def packs(packing: bool | None) -> Any:
        return ragged_trainer(tmp_path, lambda _: IDLE, rows, packing=packing).batches.packs

    assert packs(False) is None and packs(True) is not None and packs(None) is not None
    monkeypatch.setattr(epochs, "packing_obstacle", lambda module: "it reads too much")
    assert packs(None) is None and "rows are not packed: it reads too much" in caplog.text
    with pytest.raises(OptionError, match="packing is true, but it reads too much; set it to"):
        packs(True)


def test_packed_rows_train_as_rows_do(tmp_path: Path) -> None:
    """Steps of all rows, so that both have the same ones, with features that are read or cached."""
    rows, found = ragged_rows(tmp_path / "rows"), []
    for at, how in enumerate(
        ({}, {"packing": True, "packed_length": 64}, {"packing": True, "feature_cache_mb": 0.0})
    ):
        train: dict[str, Any] = {"batch_size": COUNT, "max_steps": 4, "eval_every": None, **how}
        ragged_trainer(tmp_path / str(at), lambda _: IDLE, rows, **train).fit()
        found.append(tensors(tmp_path / str(at) / "checkpoint-4" / FILES[0]))
    for name, tensor in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def accuracies(folder: Path) -> list[list[float]]:
    """What the lines of training in a folder's metrics tell."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["accuracy_by_depth"] for line in found if "loss" in line]


@pytest.mark.distributed
def test_two_processes_go_on_within_an_epoch(tmp_path: Path) -> None:
    """Byte for byte, and to the weights and accuracy of one that takes twice the rows."""
    rows = ragged_rows(tmp_path / "rows")
    both: dict[str, Any] = {"gradient_accumulation": 2, "learning_rate": 0.1}
    train = {"batch_size": 3, "dataloader_workers": 1} | both
    run_in_two_processes(tmp_path, train)
    for rank in (0, 1):
        assert (tmp_path / f"witness-{rank}").read_text() == "MULTI_CPU 2"
    check_same_checkpoints(tmp_path, *FILES)
    accuracy = [accuracies(tmp_path)]
    ragged_trainer(tmp_path / "one", lambda _: IDLE, rows, batch_size=6, **both).fit()
    accuracy.append(accuracies(tmp_path))
    assert len(accuracy[0]) == 12 and accuracy[0] == accuracy[1]
    assert any(0 < share < 1 for line in accuracy[0] for share in line)
    two, one = (tensors(tmp_path / run / "checkpoint-12" / FILES[0]) for run in ("whole", "one"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
