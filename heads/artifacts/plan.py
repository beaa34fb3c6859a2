"""Plans: trees that the planner chose for a drafter, by kind of machine and of request."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ..core import ArtifactError
from ..core.files import write_atomically, writing
from .files import PLAN, read_json
from .manifest import read_manifest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@strict
@dataclass
class Plan:
    """The tree to decode with on one kind of machine.

    Attributes:
        device, dtype: see `machine` and `dtype_name`.
        batch_size: prompts decoded at once; temperature: that they are sampled at, 0 for greedily.
        policy: the chosen candidate's name; `plain` where no tree is faster than plain decoding.
        tree: its rank paths; empty for plain decoding.
        tau, speedup: what is expected of it; 1 for plain decoding.
        acceptance: [K][W], how often the true token stood at each rank, by depth.
        costs: milliseconds, see `Costs`.
        candidates: all that were considered, the best first.
        prompts, new_tokens: how many prompts, and tokens of each, were measured.
        compiled: whether forwards were made faster, see `compile` of `Speculator`.
        forwards: by what they ran, see `Target`; empty in older plans.
    """

    device: str
    dtype: str
    batch_size: int
    policy: str
    tree: list[list[int]]
    tau: int | float
    speedup: int | float
    acceptance: list[list[float]]
    costs: dict[str, Any]
    candidates: list[dict[str, Any]]
    prompts: int
    new_tokens: int
    weights_sha256: str = ""  # of the drafter
    compiled: bool = False
    temperature: int | float = 0.0
    forwards: str = ""


def device_name(device: "torch.device") -> str:
    """The name of a kind of device: of a GPU, or `N-thread cpu`.

    >>> import torch
    >>> device_name(torch.device("cpu")).endswith("-thread cpu")
    True
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f"{torch.get_num_threads()}-thread " if device.type == "cpu" else ""
    return threads + device.type


def machine(target: "PreTrainedModel") -> str:
    """A target's devices, and the share of its weights streamed in: `NVIDIA L40, 90% from cpu`."""
    from ..core import device_of, processes_of, streamed_from

    name, streamed = device_name(device_of(target)), streamed_from(target)
    name = f"{count} × {name}" if (count := processes_of(target)) > 1 else name
    return f"{name}, {streamed}" if streamed else name


def dtype_name(model: "PreTrainedModel") -> str:
    """The type that a model computes in, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")


def write_plan(folder: Path, plan: Plan) -> Path:
    """Write a plan into an artifact's `plan.json`, beside those for other machines."""
    plan = replace(plan, weights_sha256=read_manifest(folder).weights_sha256)
    try:
        plans = _read(folder)
    except ArtifactError:
        plans = {}  # a damaged file is replaced
    document = asdict(plan)
    for candidate in document["candidates"]:
        candidate.pop("tree", None)  # hundreds of candidates, each of up to hundreds of paths
    kind = plan.device, plan.dtype, plan.batch_size, plan.compiled, plan.temperature
    plans[plan_key(*kind)] = document
    with writing("the plan", folder):
        write_atomically(folder / PLAN, json.dumps(plans, indent=2, allow_nan=False) + "\n")
    return folder / PLAN


def find_plans(folder: Path, target: "PreTrainedModel", compiled: bool = False) -> list[Plan]:
    """Plans for a target's device and dtype and the artifact's weights, for any requests.

    Where none of a batch size and temperature is for forwards that run `compiled`, or do not, it is
    the one for the others.
    """
    plans = read_plans(folder)
    own = read_manifest(folder).weights_sha256 if plans else ""
    here = machine(target), dtype_name(target), own
    plans = [each for each in plans if (each.device, each.dtype, each.weights_sha256) == here]
    plans.sort(key=lambda each: each.compiled == compiled)
    return list({(each.batch_size, each.temperature): each for each in plans}.values())


def read_plans(folder: Path) -> list[Plan]:
    """All plans in an artifact's folder, for whatever machine and weights."""
    return [_plan(found, folder) for found in _read(folder).values()]


def plan_key(
    device: str, dtype: str, batch_size: int, compiled: bool = False, temperature: float = 0.0
) -> str:
    sampled = f", temperature {temperature:g}" if temperature else ""
    return f"{device}, {dtype}, batch {batch_size}{sampled}{', compiled' if compiled else ''}"


def _plan(found: Any, folder: Path) -> Plan:
    try:
        return Plan(**found)
    except (TypeError, StrictDataclassError):
        raise _damaged(folder) from None


def _read(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / PLAN) if (folder / PLAN).is_file() else {}
    except ArtifactError:
        raise _damaged(folder) from None


def _damaged(folder: Path) -> ArtifactError:
    return ArtifactError(
        f"{folder / PLAN} is no plan that headstart wrote; delete it, or run headstart plan again."
    )
