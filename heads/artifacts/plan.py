"""What a planner decided, as it is kept beside a drafter: one plan for each kind of machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import ArtifactError
from ..core import device_of, streamed_from
from .files import PLAN, artifact_folder, is_artifact, read_json, read_manifest
from .saving import write_file

_DAMAGED = "{path} is no plan that headstart wrote; delete it, or run headstart plan again."


@dataclass(frozen=True)
class Plan:
    """What to decode with on one kind of machine.

    Attributes:
        device: see `machine`; dtype, such as `float32`; batch_size: prompts at once.
        policy: the chosen candidate's name, `plain` where nothing pays.
        tree: its rank paths; empty for plain decoding.
        tau, speedup: expected of it; 1 for plain decoding.
        acceptance: [K][W], how often the true token stood at each rank, by depth.
        costs: milliseconds, see `Costs`.
        candidates: all that were considered, the best first.
        prompts, new_tokens: what was measured on.
        weights_sha256: of the drafter that was planned for.
    """

    device: str
    dtype: str
    batch_size: int
    policy: str
    tree: list[list[int]]
    tau: float
    speedup: float
    acceptance: list[list[float]]
    costs: dict[str, Any]
    candidates: list[dict[str, Any]]
    prompts: int
    new_tokens: int
    weights_sha256: str = ""

    @property
    def key(self) -> str:
        """What it is filed under in `plan.json`."""
        return f"{self.device}, {self.dtype}, batch {self.batch_size}"


def device_name(device: torch.device) -> str:
    """The kind of machine that times hold for: a GPU's name, or the CPU's threads.

    >>> device_name(torch.device("cpu")).endswith("-thread cpu")
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f"{torch.get_num_threads()}-thread " if device.type == "cpu" else ""
    return threads + device.type


def machine(target: PreTrainedModel) -> str:
    """The kind of machine, and what is streamed on it of a target that does not fit.

    Example: `NVIDIA L40, 90% from cpu`.
    """
    name, streamed = device_name(device_of(target)), streamed_from(target)
    return f"{name}, {streamed}" if streamed else name


def dtype_name(model: PreTrainedModel) -> str:
    """What a model computes in, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")


def write_plan(name: str | Path, plan: Plan) -> Path:
    """File a plan in an artifact's `plan.json`, beside those for other machines.

    Raises:
        ArtifactError: no artifact of that name.
        OSError: its folder cannot be written.
    """
    folder = artifact_folder(name)
    plan = replace(plan, weights_sha256=read_manifest(folder).weights_sha256)
    try:
        plans = _plans(folder)
    except ArtifactError:
        plans = {}  # a damaged file holds nothing worth keeping
    kept = asdict(plan)
    for candidate in kept["candidates"]:
        candidate.pop("tree", None)  # of hundreds, each of up to hundreds of paths
    text = json.dumps(plans | {plan.key: kept}, indent=2, allow_nan=False)
    write_file(folder / PLAN, text + "\n")
    return folder / PLAN


def read_plan(name: str | Path, target: PreTrainedModel, batch_size: int = 1) -> Plan | None:
    """The plan that an artifact holds for this target's device and dtype; None where it has none.

    A plan for other weights than the artifact's does not count.

    Raises:
        ArtifactError: `plan.json` is damaged.
    """
    if not is_artifact(name):
        return None
    folder = artifact_folder(name)
    key = f"{machine(target)}, {dtype_name(target)}, batch {batch_size}"
    found = _plans(folder).get(key)
    if found is None:
        return None
    plan = _plan(found, folder)
    return plan if plan.weights_sha256 == read_manifest(folder).weights_sha256 else None


def read_plans(folder: Path) -> list[Plan]:
    """All plans in an artifact's folder, whatever machine and weights they are for.

    Raises:
        ArtifactError: `plan.json` is damaged.
    """
    return [_plan(found, folder) for found in _plans(folder).values()]


def _plan(found: Any, folder: Path) -> Plan:
    kinds = {"str": str, "int": int, "float": int | float}
    known = {each.name: kinds.get(str(each.type), list | dict) for each in fields(Plan)}
    whole = isinstance(found, dict) and set(found) == set(known)
    if not whole or not all(isinstance(found[name], kind) for name, kind in known.items()):
        raise ArtifactError(_DAMAGED.format(path=folder / PLAN))
    return Plan(**found)


def _plans(folder: Path) -> dict[str, Any]:
    if not (folder / PLAN).is_file():
        return {}
    try:
        return read_json(folder / PLAN)
    except ArtifactError:
        raise ArtifactError(_DAMAGED.format(path=folder / PLAN)) from None
