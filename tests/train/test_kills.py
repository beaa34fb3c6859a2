"""Kill -9 at random moments of runs with changed settings: what was finished stays whole."""

import hashlib
import multiprocessing
import random
import time
from pathlib import Path

import pytest
import yaml

from headstart.heads.artifacts.manifest import read_manifest
from headstart.train import pipeline
from headstart.train.recipe import load_recipe
from headstart.train.stages.folders import RECORD, stage_folders
from tests.support.recipes import TINY

CHANGED = (
    "train.learning_rate=2e-3", "distill.new_tokens=12", "target.scratch.adamw_lr=1e-3",
    "corpus.max_bytes=100_000", "decode.new_tokens=12",
)  # fmt: skip


def train(path: str, overrides: list[str], fresh: bool = False) -> None:
    pipeline.train(load_recipe(path, overrides), fresh)


def finished(root: Path) -> dict[str, str]:
    """The sha256 of every file of the finished stages."""
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in stage_folders(root)
        if (folder.path / RECORD).exists()
        for file in folder.path.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.proof)])
def test_a_kill_leaves_every_finished_stage_whole(tmp_path: Path, kills: int) -> None:
    recipe, root = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    recipe.write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "runs")}))
    started = time.perf_counter()
    train(str(recipe), [])
    seconds = time.perf_counter() - started
    draw = random.Random(kills)
    # Children start from a process that has imported everything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headstart.train.pipeline"])
    before = finished(root)
    for number in range(kills):
        setting = draw.choice(CHANGED)
        fresh = number % 3 == 2
        child = context.Process(target=train, args=(str(recipe), [setting], fresh))
        child.start()
        while f'"pid": {child.pid}' not in (root / "run.lock").read_text() and child.is_alive():
            time.sleep(0.01)
        child.join(draw.uniform(0, 1.2 * seconds))
        child.kill()
        child.join()
        after = finished(root)
        assert before.items() <= after.items()
        assert read_manifest(root / "heads").family == "medusa"
        before = after
    train(str(recipe), [CHANGED[0]])
    assert read_manifest(root / "heads").recipe["train"]["learning_rate"] == 2e-3
    assert before.items() <= finished(root).items()
