"""What a training says of itself: metrics.jsonl and its plot."""

import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from headstart.train.figures.metrics import Metrics, real_tokens, scalars
from headstart.train.figures.plot import draw_metrics
from headstart.train.figures.report.training import training_pictures
from headstart.train.fit.arguments import training_arguments
from headstart.train.fit.clock import Clock
from headstart.train.recipe import Train
from tests.support.tiny import tiny
from tests.support.training import IDLE, Killed, drafter_of, trainer_of

SPEC = Train(batch_size=2, max_steps=12, eval_every=4)
MEASURED = IDLE | {"tau": 2.5, "acceptance_by_depth": [0.5, None], "simulated_tau": 2.25}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_training_writes_a_line_for_each_log_and_validation(tmp_path: Path) -> None:
    calls: list[int] = []

    def validate(drafter: Any) -> dict[str, Any]:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Killed
        return MEASURED

    def trainer() -> Any:
        drafter = drafter_of(tiny("llama"), "medusa", heads=2)
        return trainer_of(drafter, tmp_path / "checkpoints", SPEC, validate, logging_steps=3)

    with pytest.raises(Killed):
        trainer().fit()
    path = tmp_path / "metrics.jsonl"
    assert [line["step"] for line in lines(path)] == [3, 4, 6, 8, 9, 12]
    with path.open("a") as file:
        file.write('{"step": 1')  # as a kill leaves it
    found = trainer()
    report = found.fit()  # goes on from step 8
    assert report["acceptance_by_depth"] == [0.5, None]  # as it was measured, not one by one
    written = lines(path)
    steps = [(line["step"], "tau" in line) for line in written]
    assert steps == [(3, False), (4, True), (6, False), (8, True), (9, False), (12, False),
                     (12, True)]  # fmt: skip
    for line in written:
        if "tau" in line:
            kept = {name: value for name, value in MEASURED.items() if name != "tree"}
            assert line.items() >= kept.items() and "tree" not in line
        else:
            assert line["loss"] > 0 and line["tokens_per_second"] > 0
            assert line["memory_bytes"] > 1e6 and line["learning_rate"] >= 0
            assert "share_of_peak" not in line  # a CPU's is not known
            weighed = [0.8**k * loss for k, loss in enumerate(line["loss_by_depth"], 1)]
            assert len(weighed) == 2 and line["loss"] == pytest.approx(sum(weighed), abs=1e-4)
            assert len(line["accuracy_by_depth"]) == 2
    assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(written))
    best = [entry for entry in found.state.log_history if "eval_tau" in entry]
    assert best[-1]["eval_acceptance_by_depth"] == [0.5, None] and best[-1]["step"] == 12


def test_a_line_is_added_to_those_before(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics, state = Metrics(path, Clock(10, None, 0.0), np.array([100])), SimpleNamespace()
    state.global_step, state.is_world_process_zero = 0, True
    metrics.on_train_begin(None, state, None)
    place = path.stat().st_ino
    for state.global_step in (1, 2):
        metrics.on_log(None, state, None, logs={"loss": 1.0})
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert path.stat().st_ino == place, "written anew, it would take the square of their number"


class Tracker(TrainerCallback):
    """Keeps what a tracker is told, step by step."""

    def __init__(self) -> None:
        self.told: dict[int, dict[str, Any]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.setdefault(state.global_step, {}).update(logs)


def test_trackers_are_told_the_same_figures(tmp_path: Path) -> None:
    drafter, tracker = drafter_of(tiny("llama"), "medusa", heads=2), Tracker()
    run = trainer_of(drafter, tmp_path / "run", SPEC, lambda _: MEASURED, logging_steps=3)
    run.callback_handler.callbacks.insert(0, tracker)  # as transformers places its trackers
    run.fit()
    for line in lines(tmp_path / "metrics.jsonl"):
        told = tracker.told[line["step"]]
        for name, value in line.items():
            if name in ("loss_by_depth", "accuracy_by_depth"):
                assert [told[f"{name}_{k}"] for k in (1, 2)] == value
            elif name not in ("step", "seconds", "acceptance_by_depth"):
                assert told[name if "loss" in line else f"eval_{name}"] == value


def test_tokens_are_counted_without_padding() -> None:
    lengths = np.array([3, 9, 5])
    tokens = torch.zeros(2, 9, dtype=torch.long)
    assert real_tokens({"rows": torch.tensor([2, 1]), "tokens": tokens}, lengths) == 14
    assert real_tokens({"rows": None, "tokens": tokens}, lengths) == 18
    segments = torch.tensor([[0, 0, 1, -1]])
    packed = {"rows": torch.tensor([[2, 0]]), "tokens": tokens, "segments": segments}
    assert real_tokens(packed, lengths) == 3


def test_speed_memory_and_share_of_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of 100 tokens each; steps end after 0.7 s, and 0.5 s after a validation."""
    times = iter([0.0, 0.0, 0.7, 1.7, 2.2])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock(10, None, 0.0)
    metrics = Metrics(tmp_path / "m.jsonl", clock, np.array([100]), processes=2, flops=4e12)
    metrics.peak = 1e15
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    metrics.on_step_end(None, state, None)
    metrics.on_evaluate(None, state, None, metrics={"eval_tau": float("nan")})
    metrics.on_step_end(None, state, None)
    metrics.count([{"rows": torch.tensor([0]), "tokens": torch.zeros(1, 128)}])
    state.global_step = 1
    logs = {"loss": float("inf"), "learning_rate": 1e-3} | metrics.measured()
    metrics.on_log(None, state, None, logs=logs)
    monkeypatch.undo()
    validated, trained = lines(tmp_path / "m.jsonl")
    assert validated["tau"] is None and trained["loss"] is None  # JSON has neither
    assert trained["tokens_per_second"] == pytest.approx(200 / 1.2)
    assert trained["share_of_peak"] == pytest.approx(200 / 1.2 * 4e12 / 2e15)
    assert metrics.tokens == 0 and metrics.active == 0


def test_accuracy_is_over_all_labels_of_the_targets_text(tmp_path: Path) -> None:
    """Two micro-batches count as one, what the student wrote does not, and 0 of 0 is no number."""
    metrics = Metrics(tmp_path / "m.jsonl", Clock(10, None, 0.0), np.array([100]))
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    losses = torch.tensor([1.0, 2.0, 3.0])
    for hits in ([[1, 0, 0], [1, 0, 4]], [[1, 0, 3], [9, 0, 4]]):
        metrics.add(losses, torch.tensor(hits))
    metrics.add(losses, torch.tensor([[8, 8, 8], [8, 8, 8]]), own_text=True)
    metrics.on_step_end(None, state, None)
    metrics.on_step_end(None, state, None)
    told = metrics.measured()
    assert told["accuracy_by_depth"] == [0.2, None, 0.375]
    assert told["loss_by_depth"] == [1.5, 3.0, 4.5]
    logged = scalars(told)
    assert logged["accuracy_by_depth_1"] == 0.2 and logged["accuracy_by_depth_3"] == 0.375
    assert "accuracy_by_depth_2" not in logged
    metrics.on_log(None, state, None, logs={"loss": 1.0} | logged)
    metrics.add(losses, torch.tensor([[8, 8, 8], [8, 8, 8]]), own_text=True)
    metrics.on_step_end(None, state, None)
    metrics.on_log(None, state, None, logs={"loss": 1.0} | scalars(metrics.measured()))
    first, second = lines(tmp_path / "m.jsonl")
    assert first["accuracy_by_depth"] == [0.2, None, 0.375]  # null keeps a depth's place
    assert second["loss_by_depth"] == [1.0, 2.0, 3.0] and "accuracy_by_depth" not in second


def test_trackers_get_numbers_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scalars({"eval_tau": 2.0, "eval_tau_by_source": {"a": 1}, "eval_x": [[0]]}) == {
        "eval_tau": 2.0
    }
    names, found = ["tensorboard", "wandb"], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: n if n in names else found(n))
    args = training_arguments(Train(report_to=names), tmp_path / "run" / "checkpoints", seed=0)
    assert args.report_to == names and args.run_name == "run"
    assert training_arguments(Train(), tmp_path, seed=0).report_to == []


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    trained = [{"step": i, "seconds": i, "loss": 3 / (1 + i / 40)} for i in range(5, 105, 5)]
    validated = [
        {"step": i, "seconds": i, "tau": 1 + i / 60, "tau_se": 0.05, "simulated_tau": 1 + i / 55,
         "acceptance_by_depth": [0.6 + i / 500, 0.4 + i / 500, None if i < 50 else 0.3, None]}
        for i in (25, 50, 75, 100)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in trained + validated))
    return path


def test_the_plot_shows_what_was_measured(metrics_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "metrics.png"
    assert draw_metrics(metrics_file, image, best=75)
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and image.stat().st_size > 10_000
    first = image.read_bytes()
    assert draw_metrics(metrics_file, image, best=75) and image.read_bytes() == first
    assert draw_metrics(metrics_file, image, best=50) and image.read_bytes() != first
    metrics_file.write_text('{"step": 4, "tau": 1.5}\n')  # nothing else yet
    assert draw_metrics(metrics_file, image)
    metrics_file.write_text("")
    assert not draw_metrics(metrics_file, image)
    assert not draw_metrics(tmp_path / "missing", image)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_plot_shows_what_the_training_took(
    metrics_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **how: drawn.append(self))
    took = {"tokens_per_second": 900.0, "memory_bytes": 3e9}
    took |= {"share_of_peak": 0.25} if gpu else {}
    found = [line | (took if "loss" in line else {}) for line in lines(metrics_file)]
    metrics_file.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert draw_metrics(metrics_file, tmp_path / "metrics.png")
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert [name for name in panels if "peak" in name] == ["share of the GPU's peak"] * gpu
    (line,) = panels["memory, GB"].lines
    assert set(line.get_ydata()) == {3.0} and len(panels) == 5 + gpu


def test_the_plot_shows_accuracy_by_depth(
    metrics_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **how: drawn.append(self))
    of_training = lines(metrics_file)
    for line in of_training:
        if "loss" in line:
            share = line["step"] / 200
            line |= {"accuracy_by_depth": [share, None if line["step"] < 50 else share / 2]}
    metrics_file.write_text("".join(json.dumps(line) + "\n" for line in of_training))
    assert draw_metrics(metrics_file, tmp_path / "metrics.png")
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert list(panels) == ["loss", "accuracy by depth", "tokens per round, τ",
                            "acceptance by depth"]  # fmt: skip
    first, second = panels["accuracy by depth"].lines
    assert list(first.get_ydata()) == [step / 200 for step in range(5, 105, 5)]
    assert list(second.get_xdata()) == list(range(50, 105, 5))
    named = {picture.name: picture for picture in training_pictures(metrics_file, {})}
    assert list(named) == ["loss", "accuracy", "tau", "acceptance_by_step"]
    axes = figure().subplots()
    named["accuracy"].draw(axes)
    assert len(axes.lines) == 2


def test_there_is_no_plot_without_matplotlib(
    metrics_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not draw_metrics(metrics_file, tmp_path / "metrics.png")
