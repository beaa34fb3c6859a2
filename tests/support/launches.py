"""Runs of several processes from the shipped launch files, with `several.py` as the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.paths import ROOT
from tests.support.recipes import TINY

FAMILIES: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 2},
    "redrafter": {"depths": 2},
    "draft_model": {"layers": 1},
    "mlp_speculator": {"heads": 3, "cell": "lstm"},
    "eagle3": {"depths": 2},
    "mtp": {"depths": 2},
    "medusa2": {"heads": 2, "rank": 4, "heads_first": 0.4, "dropout": 0.0},
    "dflash": {"layers": 1, "depths": 2, "anchors": 9},
    "pard": {"layers": 2, "depths": 3},
    "dspark": {
        "family": "dflash", "layers": 2, "depths": 2, "sample_from_anchor": True, "markov_rank": 4,
        "output": "trimmed", "draft_vocab_size": 200, "anchors": 9,
    },
    "early_exit": {},  # under ZeRO-3, which comes with every second of these
}  # fmt: skip
"""By name, the options of a drafter, and its family where that has another name."""
ENGINES = ["ddp_cpu", "zero2", "zero3", "fsdp2"]
"""Launch files that need no GPU, FSDP2's with a workaround, see `several.py`."""
TOLD = {"ddp_cpu": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
TYPES = {"ddp_cpu": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
STEPS = 8
# Two rows in one, threads that read ahead; validations and checkpoints after 3, 6 and 8 steps.
PACKED: dict[str, Any] = {
    "packing": True, "packed_length": 64, "dataloader_workers": 2, "eval_every": 3
}  # fmt: skip


def recipe(root: Path, name: str, family: str, batch: int, **train: Any) -> dict[str, Any]:
    """A small recipe of one of `FAMILIES`, on the corpus, target and text of the run `tiny`."""
    train = TINY["train"] | {"batch_size": batch, "max_steps": STEPS, "eval_every": 4} | train
    return TINY | {
        "decode": TINY["decode"] | {"validation_prompts": 5},
        "name": name,
        "shares": "tiny",
        "output": str(root / "runs"),
        "drafter": {"family": family, **FAMILIES[family]},
        "train": train,
        "seed": 3,
    }


@dataclass
class Job:
    """A job and its launcher."""

    folder: Path  # of the job's own files
    recipes: list[dict[str, Any]]
    launch: str | None  # a launch file; None for one process without a launcher
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)  # of the launcher, beside the file
    place: Path = ROOT  # the working directory
    command: list[str] | None = None  # what is launched, by default `several.py`
    process: Any = None

    def start(self) -> Job:
        self.folder.mkdir(parents=True)
        self.file.write_text(json.dumps({"recipes": self.recipes, **self.settings}))
        several = [str(ROOT / "tests" / "support" / "several.py"), str(self.file)]
        line = [sys.executable, *(self.command or several)]
        if self.launch is not None:
            config = str(ROOT / "recipes" / "launch" / f"{self.launch}.yaml")
            launcher = [
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                config,
                *self.arguments,
            ]
            line = [sys.executable, *launcher, *line[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("ACCELERATE_USE_CPU", None)
        if self.launch in ("ddp_cpu", "nodes", "fsdp2"):
            environment["ACCELERATE_USE_CPU"] = "true"
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                line, stdout=out, stderr=err, env=environment, cwd=self.place
            )
        return self

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    def end(self, timeout: float = 300) -> int:
        """Its exit status, when all of its processes have ended."""
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                for pid in self.pids():
                    os.kill(pid, signal.SIGKILL)
                self.process.kill()

    def run(self) -> list[list[dict[str, Any]]]:
        """What every process saw."""
        assert self.start().end() == 0, self.errors()
        files = sorted(self.folder.glob("job.json.[0-9]"))
        return [json.loads(file.read_text()) for file in files]

    def errors(self) -> str:
        return self.whole_errors()[-3000:]

    def whole_errors(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def pids(self) -> list[int]:
        """The processes of the job that are alive, but for the launcher."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.file) in line and state != "Z" and int(folder.name) != self.process.pid:
                found.append(int(folder.name))
        return found

    def wait_until_ready(self, rank: int = 0, timeout: float = 300) -> None:
        """Return when a process has reached the job's place `at`."""
        end = time.monotonic() + timeout
        while not Path(f"{self.file}.ready-{rank}").exists():
            assert self.process.poll() is None and time.monotonic() < end, self.errors()
            time.sleep(0.05)

    def wait_until_gone(self, timeout: float) -> None:
        """Return when no process of the job is left; fails after `timeout` seconds."""
        end = time.monotonic() + timeout
        while pids := self.pids():
            assert time.monotonic() < end, (pids, self.errors())
            time.sleep(0.05)


def weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    """All that a run has trained."""
    folder = root / "runs" / name / "heads"
    files = [folder / "model.safetensors", folder / "adapter" / "adapter_model.safetensors"]
    return {
        f"{file.stem}.{key}": tensor
        for file in files
        if file.exists()
        for key, tensor in load_file(file).items()
    }


def metrics(root: Path, name: str) -> dict[str, Any]:
    """What a run's artifact says of it."""
    manifest = root / "runs" / name / "heads" / "headstart.json"
    return json.loads(manifest.read_text())["metrics"]


def check_close(root: Path, first: str, second: str, kind: str, times: float = 1.0) -> None:
    """Two runs have made the same up to rounding, `times` what is usual."""
    one, two = weights(root, first), weights(root, second)
    assert one.keys() == two.keys()
    off = {key: float((two[key] - one[key]).double().norm()) for key in one}
    size = {key: float(one[key].double().norm()) for key in one}
    total = sum(x * x for x in off.values()) ** 0.5 / sum(x * x for x in size.values()) ** 0.5
    worst = max(off[key] / size[key] for key in one if size[key] > 0)
    most = 1e-3 if kind == "medusa2" else 1e-4
    assert total < times * 1e-5 and worst < times * most, (second, total, worst)
