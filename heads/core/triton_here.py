"""Whether Triton's kernels run on a device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def no_triton(device: torch.device) -> str | None:
    """Why no Triton kernel runs there; None where one does.

    On a GPU the smallest launch is tried: Triton has the machine's C compiler make a part of each,
    with Python's headers, and many containers lack one or the other.
    """
    if device.type != "cuda":
        return f"its kernel runs on CUDA, and the keys are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    try:
        from .kernels import move_path

        slots = torch.zeros(1, 1, dtype=torch.long, device=device)
        move_path(torch.zeros(1, 1, 1, 1, device=device), slots, slots)
    except Exception as error:  # of the compiler, too
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"its kernel cannot be launched ({what})"
    return None
