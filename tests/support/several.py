"""A job of one or several processes, run as a script by a launcher: `several.py JOB.json`.

The job lists recipes, which are trained in turn. Every process writes what it saw to
`JOB.json.RANK`. The last validation counts as the best one, so that which checkpoint is taken is no
matter of rounding. With `at` the process makes the file `JOB.json.ready-RANK` at a place in the
training of the recipe `run`: after a step (a number), in the second `validation`, or in the data
`loader`; then it waits for `wait` seconds, or kills itself if it is the rank `killed`. Recipes
whose names are in `bf16` take products in bfloat16, of a target in it. Those in `poisoned` read
features that are not finite, on process 1 from the sixth step on, and are expected to stop there.
Where `apart` is set each launcher's processes take those of others to be on another machine. No
pictures are drawn.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor

from headstart.infer import Speculator
from headstart.train import pipeline
from headstart.train.fit import arguments
from headstart.train.fit.non_finite import NonFiniteLoss
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.fit.validate import Validation
from headstart.train.processes import lifetime
from headstart.train.processes.lifetime import end_processes
from headstart.train.processes.stopping import Interrupted
from headstart.train.recipe import parse_recipe
from headstart.train.target_stage import RunTarget

FILE = Path(sys.argv[1])
JOB: dict[str, Any] = json.loads(FILE.read_text())
RANK = int(os.environ.get("RANK", "0"))
SEEN: list[dict[str, Any]] = []
NOW: dict[str, Any] = {"name": "", "step": 0, "decoded": 0}


def arrive(place: Any) -> None:
    """Do what the job says, at its place."""
    file = Path(f"{FILE}.ready-{RANK}")
    if (place, NOW["name"]) == (JOB.get("at"), JOB.get("run")) and not file.exists():
        file.touch()
        if JOB.get("killed") == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(JOB.get("wait", 0.0))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [value.to_local()]
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def numbers_in(folder: Path) -> int:
    """How many floating point numbers a checkpoint's files hold."""
    found: list[torch.Tensor] = []
    for file in folder.rglob("*"):
        if file.suffix == ".safetensors":
            found += safetensors.torch.load_file(file).values()
        elif file.suffix in (".pt", ".bin"):
            found += tensors_in(torch.load(file, weights_only=False))
    return sum(t.numel() for t in found if t.is_floating_point())


class Watched(DrafterTrainer):
    """What a trainer does, watched."""

    def create_optimizer(self, model: Any = None) -> Any:
        learnt = [weight for part in self.module.trained() for weight in part.parameters()]
        if self.optimizer is None:
            SEEN.append({"learnt": sum(getattr(w, "ds_numel", w.numel()) for w in learnt)})
        return ORIGINAL["create_optimizer"](self, model)

    def end_step(self, control: Any) -> None:
        ORIGINAL["end_step"](self, control)
        NOW["step"] = self.state.global_step
        arrive(self.state.global_step)

    def get_batch_samples(self, *args: Any) -> Any:  # type: ignore[override]
        if self.state.global_step == 4:
            arrive("loader")
        return ORIGINAL["get_batch_samples"](self, *args)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        ORIGINAL["_save_checkpoint"](self, model, trial)
        if RANK == 0:
            SEEN[-1]["saved"] = numbers_in(self.folder / f"checkpoint-{self.state.global_step}")
        frozen = [w for w in self.module.target.parameters() if not w.requires_grad]
        target = {str(weight.dtype) for weight in frozen}
        learnt = {str(w.dtype) for part in self.module.trained() for w in part.parameters()}
        SEEN[-1] |= {"target": sorted(target), "learnt_as": sorted(learnt)}


def last_is_best(self: Any, drafter: Any) -> dict[str, Any]:
    if NOW["step"] >= 6:
        arrive("validation")
    NOW["decoded"] = 0
    measured = VALIDATE(self, drafter)
    SEEN[-1]["decoded"] = NOW["decoded"]
    self.calls = getattr(self, "calls", 0) + 1
    return measured | {"real_tau": measured["tau"], "tau": float(time.time())}


def counted(self: Any, ids: torch.Tensor, **how: Any) -> Any:
    if self.drafter is not None:
        NOW["decoded"] += len(ids)
    return GENERATE(self, ids, **how)


def in_bf16() -> bool:
    return NOW["name"] in JOB.get("bf16", ())


def load(target: RunTarget, stage: Any) -> Any:
    if in_bf16():
        target.spec = replace(target.spec, dtype="bfloat16")
    return LOAD(target, stage)


def read(self: Any, *batch: Any) -> torch.Tensor:
    found = READ(self, *batch)
    poisoned = NOW["name"] in JOB.get("poisoned", ()) and RANK == 1 and NOW["step"] >= 5
    return found * torch.nan if poisoned else found


def relabelled(*args: Any, **how: Any) -> Any:
    made = arguments.training_arguments(*args, **how)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as where it is not installed
LOAD = RunTarget.load
names = ("create_optimizer", "end_step", "get_batch_samples", "_save_checkpoint")
ORIGINAL: dict[str, Any] = {name: getattr(DrafterTrainer, name) for name in names}
for name in names:
    setattr(DrafterTrainer, name, getattr(Watched, name))
VALIDATE, GENERATE, READ = Validation.__call__, Speculator.generate, TargetWithDrafter.read
Validation.__call__ = last_is_best  # type: ignore[method-assign]
Speculator.generate = counted  # type: ignore[method-assign]
TargetWithDrafter.read = read  # type: ignore[method-assign]
RunTarget.load = load  # type: ignore[method-assign]
arguments.multiplies_in_bf16 = in_bf16
if JOB.get("apart"):
    lifetime._machine = lambda: os.environ["GROUP_RANK"]
    lifetime._UNREACHED = 3.0
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    # On a CPU accelerate makes DDP of FSDP, unless it takes the processes for those of GPUs.
    pipeline.training_arguments = relabelled  # type: ignore[assignment]
status: Any = 0
try:
    for recipe in JOB["recipes"]:
        NOW.update(name=recipe["name"], step=0)
        with pipeline.Run(parse_recipe(recipe), fresh=False) as run:
            try:
                run.train()
            except NonFiniteLoss as error:
                if recipe["name"] not in JOB.get("poisoned", ()):
                    raise
                SEEN[-1]["stopped"] = str(error)
        state = PartialState()
        ran = {"type": state.distributed_type.value, "processes": state.num_processes}
        SEEN[-1] |= ran | {"engine": run.engine}
except Interrupted as stopped:
    status = stopped.code
Path(f"{FILE}.{RANK}").write_text(json.dumps(SEEN))
end_processes()
sys.exit(status)
