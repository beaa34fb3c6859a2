"""Two processes on the CPU, from the shipped launch files: DDP, DeepSpeed ZeRO-2 and ZeRO-3."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.train import pipeline
from headstart.train.recipe import parse_recipe
from tests.support.launches import FAMILIES, Job, recipe, weights
from tests.support.recipes import TINY

pytestmark = pytest.mark.distributed

ENGINES = ["ddp_cpu", "zero2", "zero3"]
TOLD = {"ddp_cpu": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of one process for every family."""
    root = tmp_path_factory.mktemp("distributed")
    tiny = TINY | {"output": str(root / "runs"), "seed": 3}
    pipeline.train(parse_recipe(tiny))
    Job(root / "one", [recipe(root, f"one-{name}", name, 4) for name in FAMILIES], None).run()
    return root


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, root: Path) -> tuple[str, list[list[dict[str, Any]]]]:
    """A launch file, and what two processes saw that trained all families by it."""
    name = request.param
    job = Job(root / name, [recipe(root, f"{name}-{f}", f, 2) for f in FAMILIES], name)
    seen = job.run()
    assert (job.folder / "out").read_text() == ""
    told = (job.folder / "err").read_text(errors="replace")
    assert told.count(f"distributed: {TOLD[name]}, 2 processes, cpu, float32") == len(FAMILIES)
    return name, seen


def test_the_engine_is_what_was_asked_for(root: Path, engine: Any) -> None:
    name, seen = engine
    assert len(seen) == 2
    for process in seen:
        for run in process:
            assert run["processes"] == 2
            assert run["type"] == ("MULTI_CPU" if name == "ddp_cpu" else "DEEPSPEED")
            assert run["engine"] == f"{TOLD[name]}, 2 processes, cpu, float32"
    for family in FAMILIES:
        manifest = root / "runs" / f"{name}-{family}" / "heads" / "headstart.json"
        measured = json.loads(manifest.read_text())["metrics"]
        assert measured["ran_on"] == f"{TOLD[name]}, 2 processes, cpu, float32"


def test_it_trains_what_one_process_does(root: Path, engine: Any) -> None:
    name, _ = engine
    for family in FAMILIES:
        one, two = weights(root, f"one-{family}"), weights(root, f"{name}-{family}")
        assert one.keys() == two.keys()
        off = {key: float((two[key] - one[key]).norm()) for key in one}
        size = {key: float(one[key].norm()) for key in one}
        total = sum(x * x for x in off.values()) ** 0.5 / sum(x * x for x in size.values()) ** 0.5
        worst = max(off[key] / size[key] for key in one if size[key] > 0)
        assert total < 1e-5 and worst < (1e-3 if family == "medusa2" else 1e-4), (family, total)


def test_no_checkpoint_holds_the_target(engine: Any) -> None:
    """Weights, float32 copies of them and two moments of Adam; the target is larger than all."""
    _, (process_0, _) = engine
    for run in process_0:
        assert run["learnt"] < run["saved"] < 4.5 * run["learnt"] + 100


@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_process_ends_the_others_and_loses_nothing(root: Path, name: str) -> None:
    family = "medusa2"
    run = recipe(root, f"killed-{name}", family, 2)
    job = Job(root / f"killed-{name}", [run], name, {"at": 6, "killed": 1, "wait": 60}).start()
    job.wait_until_ready(rank=1)
    job.wait_until_gone(10)
    assert job.end() != 0
    left = sorted((root / "runs" / run["name"] / "heads" / "checkpoints").glob("*/complete.json"))
    assert [file.parent.name for file in left] == ["checkpoint-4"]
    Job(root / f"again-{name}", [run], name).run()
    whole, again = weights(root, f"{name}-{family}"), weights(root, run["name"])
    assert all(torch.equal(whole[key], again[key]) for key in whole)
