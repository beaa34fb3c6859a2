"""Kill -9 at random moments of runs: what was finished stays whole, and the end is the same."""

import hashlib
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from headstart.heads.artifacts.manifest import read_manifest
from headstart.train import pipeline
from headstart.train.recipe import load_recipe
from headstart.train.smoke import chats
from headstart.train.stages.folders import RECORD, stage_folders
from tests.support.launches import PACKED
from tests.support.recipes import TINY

CHANGED = (
    "train.learning_rate=2e-3", "distill.new_tokens=12", "target.scratch.adamw_lr=1e-3",
    "corpus.max_bytes=100_000", "decode.new_tokens=12",
)  # fmt: skip


def train(path: str, overrides: list[str], fresh: bool = False) -> None:
    pipeline.train(load_recipe(path, overrides), fresh)


def train_in_child(*given: Any) -> None:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as `no_pictures`
    multiprocessing.set_start_method("fork", force=True)  # of its own workers, as in any run
    train(*given)


def finished(root: Path) -> dict[str, str]:
    """The sha256 of every file of the finished stages."""
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in stage_folders(root)
        if (folder.path / RECORD).exists()
        for file in folder.path.rglob("*")
        if file.is_file()
    }


def forks() -> Any:
    """Children start from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headstart.train.pipeline"])
    return context


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.proof)])
def test_a_kill_leaves_every_finished_stage_whole(tmp_path: Path, kills: int) -> None:
    recipe, root = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    recipe.write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "runs")}))
    started = time.perf_counter()
    train(str(recipe), [])
    seconds = time.perf_counter() - started
    draw, context = random.Random(kills), forks()
    before = finished(root)
    for number in range(kills):
        setting = draw.choice(CHANGED)
        fresh = number % 2 == 1
        child = context.Process(target=train_in_child, args=(str(recipe), [setting], fresh))
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


STAGES = ("corpus", "target", "distill", "train", "heads")


def made(root: Path) -> dict[str, Any]:
    """What a run has made, but for times and its name."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        for file in sorted((root / stage).rglob("*")):
            if file.suffix in (".safetensors", ".npy", ".jsonl") and file.name != "metrics.jsonl":
                found[str(file.relative_to(root))] = file.read_bytes()
    for name in ("config.json", "tree.json"):
        found[name] = (root / "heads" / name).read_bytes()
    manifest = json.loads((root / "heads" / "headstart.json").read_text())
    left = {"seconds", "schedules"}
    found["metrics"] = {k: v for k, v in manifest["metrics"].items() if k not in left}
    lines = map(json.loads, (root / "heads" / "metrics.jsonl").read_text().splitlines())
    found["losses"] = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return found


def begun(root: Path, stage: str, child: Any) -> bool:
    """Wait until a stage is begun; False where the run has ended before."""
    while child.is_alive():
        if any(root.glob(f"{stage}-*")):
            return True
        time.sleep(0.002)
    return False


def kill(child: Any) -> Iterator[psutil.Process]:
    """Kill a process; returns those that it had started, and that are left after ten seconds."""
    started = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.join()
    yield from psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.proof
@pytest.mark.distributed
@pytest.mark.parametrize("kills", [2, 20])
def test_a_killed_run_ends_with_the_same_artifact(tmp_path: Path, kills: int) -> None:
    """Whichever stage it was in, with grouped, packed batches that two processes read ahead."""
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats()))
    runs, path = tmp_path / "runs", tmp_path / "ragged.yaml"
    ragged = TINY | {
        "output": str(runs),
        "corpus": {"source": str(corpus), "held_out": 0.4},
        "distill": TINY["distill"] | {"prefix": "prompt", "prefix_tokens": 64, "examples": 20},
        "train": TINY["train"] | PACKED | {"packed_length": 128, "group_by_length": True},
    }
    path.write_text(yaml.safe_dump(ragged))
    context, draw, done = forks(), random.Random(kills), 0

    def start(name: str) -> Any:
        child = context.Process(target=train_in_child, args=(str(path), [f"name={name}"]))
        child.start()
        return child

    whole = start("whole")
    whole.join()
    assert whole.exitcode == 0
    seconds = {
        stage: json.loads((runs / "whole" / stage / RECORD).read_text())["seconds"]
        for stage in STAGES
    }
    expected, number = made(runs / "whole"), 0
    assert len(expected) > 12
    while done < kills:
        number += 1
        chosen = draw.sample(STAGES, min(len(STAGES), kills - done))
        for stage in sorted(chosen, key=STAGES.index):
            child = start(f"cut-{number}")
            if begun(runs / f"cut-{number}", stage, child):
                time.sleep(draw.uniform(0, 0.9 * seconds[stage]))
            if child.is_alive():
                assert not list(kill(child))
            done += child.exitcode != 0
            child.join()
        last = start(f"cut-{number}")
        last.join()
        assert last.exitcode == 0
        found = made(runs / f"cut-{number}")
        assert found.keys() == expected.keys()
        assert not [name for name in expected if found[name] != expected[name]]
