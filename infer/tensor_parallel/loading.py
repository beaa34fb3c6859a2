"""Loading of a target whose layers are divided among processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headstart.heads import OptionError
from headstart.heads.core import counted, load_pretrained, options_in_parts, way_refused
from headstart.heads.core.offload import NOT_READ

from ..target import AUTO
from .led import lead
from .workers import Workers

_workers: Workers | None = None


def check_in_parts(
    processes: int, by_name: bool, device: Any, options: Mapping[str, Any], ways: Mapping[str, Any]
) -> None:
    """Refuse what `load` is given beside `tensor_parallel`, before anything is loaded.

    Args:
        ways: to run that it has not, which are refused where they are asked for.

    Raises:
        OptionError: a model that is loaded already, a place for it, too few GPUs, or another number
            of processes than runs already.
    """
    if not isinstance(processes, int) or processes < 1:
        raise OptionError(f"tensor_parallel is {processes!r}; expected at least 1, a whole number.")
    if not by_name:
        raise OptionError(
            f"tensor_parallel is {processes}, and the target is a model that is loaded already; "
            "give its folder or Hub name."
        )
    if device is not None or "device_map" in options:
        raise OptionError(
            "tensor_parallel puts a part of the target on each of the first GPUs, and device or "
            "device_map says where all of it is; leave that out."
        )
    if asked := [name for name, value in ways.items() if value not in (None, False, AUTO)]:
        raise way_refused(asked[0], ways[asked[0]])
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise OptionError(
            f"tensor_parallel is {processes}, and torch finds {counted(gpus, 'GPU')} here; take no "
            "more processes than there are GPUs."
        )
    if _workers is not None and not _workers.lost:
        if _workers.processes != processes:
            raise OptionError(
                f"tensor_parallel is {processes}, and this process has a target that is divided "
                f"among {_workers.processes} processes; take as many, or load it in a process of "
                "its own."
            )
    elif "RANK" in os.environ or torch.distributed.is_initialized():
        raise OptionError(
            "tensor_parallel starts the other processes itself, and this one is of a group that a "
            "launcher has started; start a single process, without torchrun or accelerate launch."
        )


def load_in_parts(name: Any, processes: int, **options: Any) -> PreTrainedModel:
    """Load a target whose layers are divided among so many processes, on the first GPUs.

    Without a GPU they share the CPU, which is for trying it out. See `check_in_parts`.

    Args:
        name: its folder or Hub name.
        options: of `from_pretrained`.

    Raises:
        OptionError: transformers has no plan for it, or its heads cannot be divided so.
        DecodingError: a process has ended.
    """
    global _workers
    found = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    otherwise = "spread it over the GPUs of one process by --max-memory (device_map='auto')"
    options |= options_in_parts(name, "auto", processes, "tensor_parallel", otherwise, **found)
    if _workers is None or _workers.lost:
        _workers = Workers(processes, "cuda" if torch.cuda.is_available() else "cpu")
    workers, number = _workers, _workers.next_number()
    try:
        with workers.answered("load", number, str(name), options):
            model = load_pretrained(AutoModelForCausalLM, name, **options).eval()
    except BaseException:
        workers.drop(number)
        raise
    weakref.finalize(model, workers.drop, number)
    for module in model.modules():
        if any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
            setattr(module, NOT_READ, True)
    lead(model, workers, number)
    return model
