"""Two processes on the CPU, from the shipped launch files: DDP, DeepSpeed ZeRO-2 and ZeRO-3, FSDP2.

Each trains several families, DDP all of them, and one a second time, on packed rows, killed on the
way. The proofs train and kill all of them under each engine; ZeRO-2 is a proof but for offloading.
FSDP2 is only as far as a CPU can, see `several.py`.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headstart.heads import OptionError, family
from headstart.train import pipeline
from headstart.train.fit.validate import Validation
from headstart.train.recipe import parse_recipe
from headstart.train.stages.kept import read_drafter
from tests.support.launches import (
    ENGINES,
    FAMILIES,
    PACKED,
    TOLD,
    TYPES,
    Job,
    check_close,
    metrics,
    recipe,
)
from tests.support.recipes import TINY, launch

pytestmark = pytest.mark.distributed

TRIED = [
    pytest.param(name, marks=pytest.mark.proof) if name == "zero2" else name for name in ENGINES
]
# The last checkpoint after an interruption at a place of `several.py`: a step, or where it says.
KEPT: dict[Any, dict[Any, set[int]]] = {
    "kill": {5: {3}, "validation": {3}, "loader": {3}},
    "launcher": {5: {3}, "validation": {3}, "loader": {3}},
    "SIGTERM": {5: {6, 7}, "validation": {7}, "loader": {5, 6}},
    "SIGINT": {5: {6, 7}, "validation": {7}, "loader": {5, 6}},
}
# The family that is killed, packed, and the one that is trained in bfloat16, by engine; proofs take
# all. None is one process.
CUT = {
    None: "medusa", "ddp_cpu": "redrafter", "zero2": "medusa2", "zero3": "eagle3",
    "fsdp2": "draft_model",
}  # fmt: skip
ROUNDED = {
    None: "redrafter", "ddp_cpu": "draft_model", "zero2": "eagle3", "zero3": "medusa2",
    "fsdp2": "medusa",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distributed")
    pipeline.train(parse_recipe(TINY | {"output": str(root / "runs"), "seed": 3}))
    return root


@dataclass
class Trained:
    """What the runs of an engine showed."""

    seen: list[list[dict[str, Any]]]  # by every process, of every recipe
    names: list[str]  # the recipes of the last job
    told: str  # on stderr
    ended: dict[str, Any] = field(default_factory=dict)  # how others ended before

    def of(self, name: str) -> list[dict[str, Any]]:
        """What each process saw of a recipe."""
        return [process[self.names.index(name)] for process in self.seen]


def batch(engine: str | None) -> int:
    """Half a batch for each of two processes."""
    return 2 if engine else 4


def interrupt(
    root: Path, name: str, kind: str, engine: str | None, at: Any, act: str, before: Any = ()
) -> dict[str, Any]:
    """Interrupt a packed run; returns its recipe.

    Args:
        at: the place in its training, see `several.py`.
        act: `kill`, of a process; `launcher`, of that; or the name of a signal to the launcher.
        before: recipes that go on to their end first.
    """
    run = recipe(root, name, kind, batch(engine), **PACKED)
    killed = (1 if engine else 0) if act == "kill" else None
    how = {"at": at, "run": name, "killed": killed, "wait": 60.0 if act == "kill" else 2.0}
    job = Job(root / f"interrupted-{name}", [*before, run], engine, how).start()
    job.wait_until_ready(killed or 0)
    if act == "launcher":
        os.kill(job.process.pid, signal.SIGKILL)
    elif act != "kill":
        os.kill(job.process.pid, signal.Signals[act])
    # A signal leaves the time for a step, a validation and a checkpoint, as long as launchers wait.
    job.wait_until_gone(30 if act.startswith("SIG") else 10)
    assert job.end() != 0
    assert last_checkpoint(root, name) in KEPT[act][at]
    return run


@pytest.fixture(scope="module")
def trained(root: Path) -> Callable[[str | None], Trained]:
    """What the processes saw that trained all families by a launch file, once."""

    @cache
    def train(engine: str | None) -> Trained:
        own = label(engine)
        cut = [interrupt(root, f"killed-{own}", CUT[engine], engine, 5, "kill")]
        ended = {}
        if engine == "ddp_cpu":
            with pytest.raises(OptionError) as refused:
                pipeline.train(parse_recipe(cut[0]))
            ended["alone"] = str(refused.value)
            for act, at in (("SIGTERM", "validation"), ("launcher", "loader")):
                cut.append(interrupt(root, f"{act}-{own}", CUT[engine], engine, at, act))
        whole = recipe(root, f"whole-{own}", CUT[engine], batch(engine), **PACKED)
        each = [recipe(root, f"{own}-{kind}", kind, batch(engine)) for kind in kinds(engine)]
        rounded = recipe(root, f"bf16-{own}", ROUNDED[engine], batch(engine))
        poisoned = [recipe(root, f"poisoned-{own}", "medusa", 2)] if engine else []
        parts = []
        if engine == "ddp_cpu":  # the first makes corpus, target and text itself
            parts = [recipe(root, f"parts-{kind}", kind, 4) for kind in ("medusa", "eagle3")]
            parts[0]["shares"] = None
            for run in parts:
                run["target"] = run["target"] | {"tp_plan": "auto"}
        runs = [*cut, whole, *each, rounded, *poisoned, *parts]
        how = {"bf16": [rounded["name"]], "poisoned": [run["name"] for run in poisoned]}
        job = Job(root / own, runs, engine, how)
        seen = job.run()
        assert (job.folder / "out").read_text() == ""
        told = (job.folder / "err").read_text(errors="replace")
        return Trained(seen, [run["name"] for run in runs], told, ended)

    return train


def kinds(engine: str | None) -> list[str]:
    """Of the families, all in one process and by DDP, and each by ZeRO-3 or FSDP2, too."""
    if engine in (None, "ddp_cpu"):
        return list(FAMILIES)
    own = list(FAMILIES)[engine == "fsdp2" :: 2]
    return [kind for kind in FAMILIES if kind in ("medusa", "eagle3", *own)]


def label(engine: str | None) -> str:
    return engine or "one"


@pytest.fixture(params=TRIED)
def engine(
    request: pytest.FixtureRequest, trained: Callable[[str | None], Trained]
) -> tuple[str, Trained]:
    return request.param, trained(request.param)


def test_the_engine_is_what_was_asked_for(root: Path, engine: Any) -> None:
    name, trained = engine
    assert len(trained.seen) == 2
    told = f"{TOLD[name]}, 2 processes, cpu, float32"
    others = ("bf16", "parts")
    plain = [run for run in trained.names if not run.startswith(others)]
    assert trained.told.count(f"distributed: {told}") == len(plain)
    for process in trained.seen:
        for run, seen in zip(trained.names, process, strict=True):
            assert seen["processes"] == 2 and seen["type"] == TYPES[name]
            assert run.startswith(others) or seen["engine"] == told
    for kind in kinds(name):
        assert metrics(root, f"{name}-{kind}")["ran_on"] == told


def test_it_trains_what_one_process_does(
    root: Path, engine: Any, trained: Callable[[str | None], Trained]
) -> None:
    name, _ = engine
    trained(None)
    for kind in kinds(name):
        check_close(root, f"one-{kind}", f"{name}-{kind}", kind)


@pytest.mark.proof
@pytest.mark.parametrize("name", ENGINES)
def test_every_family_trains_as_in_one_process(
    root: Path, trained: Callable[[str | None], Trained], name: str
) -> None:
    trained(None)
    able = [kind for kind in FAMILIES if (name, kind) != ("fsdp2", "early_exit")]  # it is refused
    runs = [recipe(root, f"all-{name}-{kind}", kind, 2) for kind in able]
    Job(root / f"all-{name}", runs, name).run()
    for kind in able:
        check_close(root, f"one-{kind}", f"all-{name}-{kind}", kind)


def test_validation_is_that_of_one_process(root: Path, engine: Any) -> None:
    """Divided among those that hold the whole target; under ZeRO-3 and FSDP2 all go in step."""
    name, trained = engine
    for kind in ("medusa", "eagle3"):
        run = f"{name}-{kind}"
        decoded = [seen["decoded"] for seen in trained.of(run)]
        assert decoded == ([3, 2] if name in ("ddp_cpu", "zero2") else [5, 5])
        with pipeline.Run(parse_recipe(recipe(root, run, kind, 2)), fresh=False) as one:
            corpus = one._corpus()
            loaded = one._judged(corpus, one._target(corpus))
            folder = root / "runs" / run / "heads"
            drafter = read_drafter(family(kind), loaded.target, folder)
            expected = loaded.validation(one.recipe)(drafter)
            del expected["samples"]  # they are for the report, and no metric
        assert isinstance(loaded.validation(one.recipe), Validation)
        found = metrics(root, run)
        assert found["real_tau"] == expected.pop("tau") > 1
        assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", [None, *TRIED])
def test_no_checkpoint_holds_the_target(
    trained: Callable[[str | None], Trained], name: str | None
) -> None:
    """At most the weights twice, a copy for the optimizer, and Adam's two moments."""
    for run in trained(name).seen[0]:
        assert "stopped" in run or run["learnt"] < run["saved"] < 5.1 * run["learnt"]


@pytest.mark.parametrize("name", [None, *TRIED])
def test_a_killed_process_ends_the_others_and_loses_nothing(
    root: Path, trained: Callable[[str | None], Trained], name: str | None
) -> None:
    trained(name)
    check_the_same(root, f"whole-{label(name)}", f"killed-{label(name)}")


def test_a_signal_ends_all_processes_after_the_step(
    root: Path, trained: Callable[[str | None], Trained]
) -> None:
    trained("ddp_cpu")
    check_the_same(root, "whole-ddp_cpu", "SIGTERM-ddp_cpu")


def test_a_killed_launcher_ends_its_processes(
    root: Path, trained: Callable[[str | None], Trained]
) -> None:
    trained("ddp_cpu")
    check_the_same(root, "whole-ddp_cpu", "launcher-ddp_cpu")


def test_another_number_of_processes_is_refused(trained: Callable[[str | None], Trained]) -> None:
    assert "engine DDP, and this run has one process" in trained("ddp_cpu").ended["alone"]


def test_a_loss_that_is_not_finite_stops_all_processes_within_the_step(engine: Any) -> None:
    name, trained = engine
    told = [seen["stopped"] for seen in trained.of(f"poisoned-{name}")]
    assert told[0] == told[1] and "step 6: the loss of training rows " in told[0]
    assert "checkpoint-4 is kept" in told[0]


@pytest.mark.parametrize("name", [None, *TRIED])
def test_bfloat16_products_leave_weights_in_float32(
    trained: Callable[[str | None], Trained], name: str | None
) -> None:
    for seen in trained(name).of(f"bf16-{label(name)}"):
        assert seen["engine"].endswith("cpu, bfloat16 products")
        assert seen["target"] == ["torch.bfloat16"] and seen["learnt_as"] == ["torch.float32"]


def test_processes_that_divide_the_target_train_what_one_does(
    root: Path, trained: Callable[[str | None], Trained]
) -> None:
    """By transformers' plan for it: each step has the rows of one process, and each text too."""
    seen = trained("ddp_cpu")
    trained(None)
    for kind in ("medusa", "eagle3"):
        check_close(root, f"one-{kind}", f"parts-{kind}", kind)
        told = "tensor parallelism, 2 processes, cpu, float32"
        assert all(process["engine"] == told for process in seen.of(f"parts-{kind}"))
        assert [process["decoded"] for process in seen.of(f"parts-{kind}")] == [5, 5]
    written = [
        {file.name: file.read_bytes() for file in (root / "runs" / run / "distill").glob("*.npy")}
        for run in ("tiny", "parts-medusa")
    ]
    assert len(written[0]) > 4 and written[0] == written[1]


@pytest.mark.parametrize(
    "name", ["zero2_offload", pytest.param("zero3_offload", marks=pytest.mark.proof)]
)
def test_offloading_changes_nothing(
    root: Path, trained: Callable[[str | None], Trained], name: str
) -> None:
    """As far as a CPU can: its memory is where offloaded weights and optimizers' states go."""
    trained(None)
    kinds = ("eagle3", "medusa2")
    runs = [recipe(root, f"{name}-{kind}", kind, 2) for kind in kinds]
    for process in Job(root / name, runs, name).run():
        assert {seen["type"] for seen in process} == {"DEEPSPEED"}
    for kind in kinds:
        told = "ZeRO-2" if name == "zero2_offload" else "ZeRO-3"
        assert metrics(root, f"{name}-{kind}")["ran_on"] == f"{told}, 2 processes, cpu, float32"
        check_close(root, f"one-{kind}", f"{name}-{kind}", kind)


@pytest.mark.proof
@pytest.mark.parametrize("name", ENGINES)
def test_saving_memory_and_compiling_change_nothing(
    root: Path, trained: Callable[[str | None], Trained], name: str
) -> None:
    trained(None)
    again, compiled = {"activation_checkpointing": True}, {"compile": True}
    options = {
        "draft_model": again, "eagle3": again, "medusa2": again | compiled, "redrafter": compiled,
        "medusa": compiled,
    }  # fmt: skip
    runs = [recipe(root, f"options-{name}-{kind}", kind, 2, **how) for kind, how in options.items()]
    Job(root / f"options-{name}", runs, name).run()
    for kind in options:
        check_close(root, f"one-{kind}", f"options-{name}-{kind}", kind)


def test_a_single_process_in_place_of_two_is_refused(root: Path) -> None:
    """Which is what accelerate starts with `--cpu`, in silence."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
        *("-m", "headstart.train", "quickstart", f"output={root}/never"),
    ]
    done = launch(command)
    assert done.returncode != 0 and "asks for 2 processes, and this run has 1" in done.stderr
    assert not (root / "never").exists()


@pytest.mark.proof
@pytest.mark.parametrize("act", ["kill", "launcher", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("name", [None, *ENGINES])
def test_any_family_goes_on_from_any_end(root: Path, name: str | None, act: str) -> None:
    """Interrupted in a step, in the validation and in the loader, in turn."""
    if name is None and act == "launcher":
        pytest.skip("one process has no launcher")
    places, cut = [5, "validation", "loader"], []
    for number, kind in enumerate(FAMILIES):
        run, at = f"{act}-{label(name)}-{kind}", places[number % 3]
        cut.append(interrupt(root, run, kind, name, at, act, cut[-1:]))
    whole = [
        recipe(root, f"whole-{act}-{label(name)}-{kind}", kind, batch(name), **PACKED)
        for kind in FAMILIES
    ]
    Job(root / f"{act}-{label(name)}", [cut[-1], *whole], name).run()
    for one, other in zip(whole, cut, strict=True):
        check_the_same(root, one["name"], other["name"])


@pytest.mark.proof
@pytest.mark.parametrize("name", [None, *ENGINES])
def test_every_family_is_float32_under_bfloat16(root: Path, name: str | None) -> None:
    runs = [recipe(root, f"all16-{label(name)}-{kind}", kind, batch(name)) for kind in FAMILIES]
    job = Job(root / f"all16-{label(name)}", runs, name, {"bf16": [run["name"] for run in runs]})
    for process in job.run():
        for seen in process:
            assert seen["target"] == ["torch.bfloat16"] and seen["learnt_as"] == ["torch.float32"]


def last_checkpoint(root: Path, name: str) -> int | None:
    """The step of a run's last one that is whole."""
    found = (root / "runs" / name).glob("train*/checkpoints/*/complete.json")
    return max((int(file.parent.name.partition("-")[2]) for file in found), default=None)


def check_the_same(root: Path, one: str, other: str) -> None:
    """Two runs have made the same, byte for byte."""
    folders = [root / "runs" / name / "heads" for name in (one, other)]
    files = [
        sorted(file.relative_to(folder) for file in folder.rglob("*.safetensors"))
        for folder in folders
    ]
    assert files[0] == files[1] != []
    for file in [*files[0], "config.json", "tree.json"]:
        contents = [(folder / file).read_bytes() for folder in folders]
        assert contents[0] == contents[1], (other, file)
