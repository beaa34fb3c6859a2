"""Two processes on the CPU, from the shipped launch files: DDP, DeepSpeed ZeRO-2 and ZeRO-3, FSDP2.

FSDP2 is only as far as a CPU can, see `several.py`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.train import pipeline
from headstart.train.recipe import parse_recipe
from tests.support.launches import FAMILIES, Job, recipe, weights
from tests.support.recipes import TINY, launch

pytestmark = pytest.mark.distributed

ENGINES = ["ddp_cpu", "zero2", "zero3", "fsdp2"]
TOLD = {"ddp_cpu": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
TYPES = {"ddp_cpu": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of one process for every family."""
    root = tmp_path_factory.mktemp("distributed")
    tiny = TINY | {"output": str(root / "runs"), "seed": 3}
    pipeline.train(parse_recipe(tiny))
    Job(root / "one", [recipe(root, f"one-{name}", name, 4) for name in FAMILIES], None).run()
    return root


Seen = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(root: Path) -> Callable[[str], Seen]:
    """What two processes saw that trained all families by a launch file, once."""

    @cache
    def train(name: str) -> Seen:
        job = Job(root / name, [recipe(root, f"{name}-{f}", f, 2) for f in FAMILIES], name)
        seen = job.run()
        assert (job.folder / "out").read_text() == ""
        told = (job.folder / "err").read_text(errors="replace")
        assert told.count(f"distributed: {TOLD[name]}, 2 processes, cpu, float32") == len(FAMILIES)
        return seen

    return train


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, trained: Callable[[str], Seen]) -> tuple[str, Seen]:
    return request.param, trained(request.param)


def test_the_engine_is_what_was_asked_for(root: Path, engine: Any) -> None:
    name, seen = engine
    assert len(seen) == 2
    for process in seen:
        for run in process:
            assert run["processes"] == 2
            assert run["type"] == TYPES[name]
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
    """At most the weights twice, a copy for the optimizer, and Adam's two moments."""
    _, (process_0, _) = engine
    for run in process_0:
        assert run["learnt"] < run["saved"] < 5.1 * run["learnt"]


def checkpoints(root: Path, name: str) -> list[str]:
    """The whole ones of a run."""
    found = (root / "runs" / name).glob("train*/checkpoints/*/complete.json")
    return sorted(file.parent.name for file in found if not file.parents[2].is_symlink())


def check_the_same(root: Path, one: str, other: str) -> None:
    whole, again = weights(root, one), weights(root, other)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@pytest.mark.proof
@pytest.mark.parametrize("name", [None, *ENGINES])
def test_a_killed_process_ends_the_others_and_loses_nothing(
    root: Path, trained: Callable[[str], Seen], name: str | None
) -> None:
    if name is not None:
        trained(name)
    label = name or "one"
    run = recipe(root, f"killed-{label}", "medusa2", 2 if name else 4)
    killed = {"at": 6, "killed": 1 if name else 0, "wait": 60.0}
    job = Job(root / f"killed-{label}", [run], name, killed).start()
    job.wait_until_ready(killed["killed"])
    job.wait_until_gone(10)
    assert job.end() != 0
    assert checkpoints(root, run["name"]) == ["checkpoint-4"]
    Job(root / f"again-{label}", [run], name).run()
    check_the_same(root, f"{label}-medusa2", run["name"])


@pytest.mark.proof
def test_a_signal_ends_all_processes_after_the_step(
    root: Path, trained: Callable[[str], Seen]
) -> None:
    trained("ddp_cpu")
    run = recipe(root, "stopped", "medusa2", 2)
    job = Job(root / "stopped", [run], "ddp_cpu", {"at": "loader", "wait": 1.0}).start()
    job.wait_until_ready()
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait_until_gone(30)
    assert job.end() != 0
    (step,) = [name for name in checkpoints(root, "stopped") if name != "checkpoint-4"]
    assert step in ("checkpoint-6", "checkpoint-7")
    Job(root / "going-on", [run], "ddp_cpu").run()
    check_the_same(root, "ddp_cpu-medusa2", "stopped")


@pytest.mark.proof
def test_a_killed_launcher_ends_its_processes(root: Path, trained: Callable[[str], Seen]) -> None:
    trained("ddp_cpu")
    run = recipe(root, "orphaned", "medusa2", 2)
    job = Job(root / "orphaned", [run], "ddp_cpu", {"at": 6, "wait": 1.0}).start()
    job.wait_until_ready()
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    job.wait_until_gone(10)
    assert "checkpoint-4" in checkpoints(root, "orphaned")
    Job(root / "adopted", [run], "ddp_cpu").run()
    check_the_same(root, "ddp_cpu-medusa2", "orphaned")


def test_another_number_of_processes_is_refused(root: Path) -> None:
    run = recipe(root, "shrunk", "medusa", 2)
    job = Job(root / "shrunk", [run], "ddp_cpu", {"at": 6, "killed": 1}).start()
    job.wait_until_ready(rank=1)
    job.wait_until_gone(10)
    job.end()
    alone = Job(root / "alone", [run], None).start()
    assert alone.end() != 0
    assert "engine DDP, and this run has one process" in alone.errors()


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_bfloat16_products_leave_weights_in_float32(root: Path, name: str) -> None:
    run = recipe(root, f"bf16-{name}", "eagle3", 2)
    for process in Job(root / f"bf16-{name}", [run], name, {"bf16": True}).run():
        (seen,) = process
        assert seen["engine"] == f"{TOLD[name]}, 2 processes, cpu, bfloat16 products"
        assert seen["target"] == ["torch.bfloat16"] and seen["learnt_as"] == ["torch.float32"]


def test_a_single_process_in_place_of_two_is_refused(root: Path) -> None:
    """Which is what accelerate starts with `--cpu`, in silence."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
        *("-m", "headstart.train", "quickstart", f"output={root}/never"),
    ]
    done = launch(command)
    assert done.returncode != 0 and "asks for 2 processes, and this run has 1" in done.stderr
    assert not (root / "never").exists()
