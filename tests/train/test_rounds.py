"""Rows written in rounds, by the drafter that learns from them, are those of the target alone."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.train import pipeline, rounds
from headstart.train.data.training_rows import Rows
from headstart.train.recipe import Recipe, RecipeError, load_recipe
from tests.support.paths import ROOT
from tests.support.recipes import TINY, launch

LORA = "drafter={family: draft_model, layers: 1, lora: {rank: 2}}"
EXACT = ["target.dtype=float64", "distill.use_drafter=always", "train.eval_every=null"]


def made(tmp_path: Path, name: str, *overrides: str) -> Recipe:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "runs")}))
    return load_recipe(path, [*EXACT, f"name={name}", *overrides])


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("train-*")}


@pytest.mark.usefixtures("no_pictures")
def test_rows_and_weights_are_those_without_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = made(tmp_path, "whole"), made(tmp_path, "cut", "shares=whole", "distill.rounds=3")
    expected = pipeline.train(whole)
    (run,) = [whole.folder]
    found = shards(run / "distill")
    shutil.rmtree((run / "distill").resolve())
    (run / "distill").unlink(missing_ok=True)
    trained: list[tuple[int, str | None]] = []
    train = rounds.train_drafter

    def counted(recipe: Recipe, args: Any, loaded: Any, rows: Rows, folder: Path) -> Any:
        trained.append((len(rows), recipe.train.from_))
        if len(trained) == 2:
            raise KeyboardInterrupt  # as if killed in the training between the last two rounds
        return train(recipe, args, loaded, rows, folder)

    monkeypatch.setattr(rounds, "train_drafter", counted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(cut)
    artifact = pipeline.train(cut)
    # One shard, two, four in all; the second training was begun anew, from the first one's head.
    assert [count for count, _ in trained] == [6, 12, 12]
    assert trained[0][1] is None and trained[1][1] == trained[2][1] is not None
    (folder,) = [p for p in (run, cut.folder) if (p / "distill").exists()]
    assert shards(folder / "distill") == found
    names = ("model.safetensors", "tree.json")
    assert all((artifact / n).read_bytes() == (expected / n).read_bytes() for n in names)
    told = json.loads((folder / "distill" / "manifest.json").read_text())["drafting"]
    assert [each["used"] for each in told] == [True, True]
    left = {p.name for p in (folder / "distill" / "rounds").rglob("*") if p.is_file()}
    assert left == {"drafting.json"}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("overrides", "steps"),
    # 6 and 12 rows, 4 a step; of three epochs one is for each round.
    [
        (["train.epochs=3"], [2, 3]),
        (["train.epochs=3", "distill.round_steps=5"], [5, 5]),
        ([LORA, "decode.tree=chain:2", "distill.round_steps=1"], [1, 1]),
    ],
)
def test_rounds_divide_the_epochs_and_any_family_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], steps: list[int]
) -> None:
    found, train = [], rounds.train_drafter

    def noted(*of: Any) -> Any:
        drafter, report = train(*of)
        found.append(report["steps"])
        return drafter, report

    monkeypatch.setattr(rounds, "train_drafter", noted)
    recipe = made(tmp_path, "r", "distill.rounds=3", "train.max_steps=3000", *overrides)
    pipeline.write_text(recipe)
    assert found == steps


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("other", ["drafter={family: redrafter, depths: 2}", "drafter.heads=1"])
def test_an_interrupted_run_goes_on_with_another_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    trained, train = [], rounds.train_drafter

    def noted(recipe: Recipe, *of: Any) -> Any:
        trained.append((recipe.drafter.family, recipe.train.from_ is not None))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(recipe, *of)

    monkeypatch.setattr(rounds, "train_drafter", noted)
    how = "distill.rounds=3", "distill.round_steps=1"
    with pytest.raises(KeyboardInterrupt):
        pipeline.write_text(made(tmp_path, "r", *how))
    stage = pipeline.write_text(made(tmp_path, "r", *how, other))
    assert len(Rows.load(stage.folder)) == 24
    assert trained[:2] == [("medusa", False), ("medusa", True)]
    assert trained[2] == ("redrafter" if "redrafter" in other else "medusa", False)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["distill.writer=given"], "with the writer given, which no drafter speeds up"),
        (["distill.shards=2"], "a shard a round at least"),
        (["drafter.family=medusa2", "drafter.heads=2"], "changes the target's text"),
        (["drafter={family: lookup}"], "is not trained"),
    ],
)
def test_rounds_that_cannot_be(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=said):
        pipeline.write_text(made(tmp_path, "r", "distill.rounds=3", *overrides))
    assert not (tmp_path / "runs").exists()


@pytest.mark.distributed
def test_two_processes_write_and_learn_in_rounds(tmp_path: Path) -> None:
    whole = made(tmp_path, "whole")
    found = shards(pipeline.write_text(whole).folder)
    config = str(ROOT / "recipes" / "launch" / "ddp_cpu.yaml")
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        config,
        "-m",
        "headstart.train",
    ]
    done = launch(
        [
            sys.executable,
            *launcher,
            "--until",
            "distill",
            str(tmp_path / "tiny.yaml"),
            *EXACT,
            "name=cut",
            "distill.rounds=2",
        ]
    )
    assert done.returncode == 0, done.stderr
    distilled = tmp_path / "runs" / "cut" / "distill"
    assert shards(distilled) == found
    told = json.loads((distilled / "manifest.json").read_text())["drafting"]
    assert [each["used"] for each in told] == [True]
