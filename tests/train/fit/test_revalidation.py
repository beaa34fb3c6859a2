"""A run that goes on with other settings of validation compares nothing with what it forgets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import Drafter
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.recipe import Train
from tests.support.tiny import tiny
from tests.support.training import IDLE, drafter_of, tensors, trainer_of

SPEC = Train(batch_size=2, max_steps=12, eval_every=4)
LONGER = replace(SPEC, max_steps=16)


class Scripted:
    """A validation that gives one τ after the other, and keeps the weights that it was given."""

    def __init__(self, *taus: float):
        self.taus, self.seen = list(taus), []

    def __call__(self, drafter: Drafter) -> dict[str, Any]:
        self.seen.append({name: each.clone() for name, each in drafter.state_dict().items()})
        return IDLE | {"tau": self.taus.pop(0)}


def trainer(folder: Path, spec: Train, validate: Any, tree: str) -> DrafterTrainer:
    torch.manual_seed(0)
    drafter = drafter_of(tiny("llama"), "medusa", heads=2)
    return trainer_of(drafter, folder, spec, validate, evaluation={"tree": tree})


def validated(run: DrafterTrainer) -> dict[Any, float]:
    entries = [entry for entry in run.state.log_history if "eval_tau" in entry]
    return {entry["step"]: entry["eval_tau"] for entry in entries}


@pytest.mark.parametrize(("taus", "best"), [((1.5, 1.4, 1.2), 4), ((1.2, 1.4, 1.3), 12)])
def test_checkpoints_are_measured_anew(tmp_path: Path, taus: tuple[float, ...], best: int) -> None:
    folder, first = tmp_path / "cut" / "checkpoints", Scripted(3.0, 2.5, 2.6)
    assert trainer(folder, SPEC, first, "sparse:16").fit()["best_step"] == 4
    again = Scripted(*taus)
    run = trainer(folder, LONGER, again, "chain:1")
    report = run.fit()
    expected: dict[Any, float] = dict(zip((4, 12, 16), taus, strict=True))
    assert validated(run) == expected and not again.taus
    assert report["best_step"] == best and report["tau"] == expected[best]
    for name, tensor in run.module.drafter.state_dict().items():
        assert torch.equal(again.seen[0][name], first.seen[0][name])
        assert torch.equal(again.seen[1][name], first.seen[2][name])
        assert torch.equal(tensor, again.seen[(4, 12).index(best)][name])
    lines = map(json.loads, (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines())
    assert [(line["step"], line["tau"]) for line in lines if "tau" in line] == [*expected.items()]
    # What is measured in between changes no step.
    same = tmp_path / "same" / "checkpoints"
    trainer(same, SPEC, Scripted(3.0, 2.5, 2.6), "chain:1").fit()
    trainer(same, LONGER, Scripted(1.2), "chain:1").fit()
    one, two = (tensors(place / "checkpoint-16" / "optimizer.pt") for place in (folder, same))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_the_same_settings_measure_nothing_again(tmp_path: Path) -> None:
    trainer(tmp_path, SPEC, Scripted(3.0, 2.5, 2.6), "chain:1").fit()
    again = Scripted(2.0)
    run = trainer(tmp_path, LONGER, again, "chain:1")
    assert run.fit()["best_step"] == 4 and len(again.seen) == 1
    assert validated(run) == {4: 3.0, 8: 2.5, 12: 2.6, 16: 2.0}
