"""Whether Triton's kernels run on a device."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_SIZE = 256
_LEAST = (8, 0)
"""The compute capability that Triton supports from. It compiles for 7.5 as well, but attention then
spills 30 kB of registers for each thread."""


def has_triton(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU on which Triton's kernels run."""
    return tensor.is_cuda and no_triton(tensor.device) is None


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
    if (found := torch.cuda.get_device_capability(device)) < _LEAST:
        least, found = (".".join(map(str, each)) for each in (_LEAST, found))
        return f"its kernel needs a GPU of compute capability {least}, found {found}"
    try:
        from .kernels import move_path

        slots = torch.zeros(1, 1, dtype=torch.long, device=device)
        move_path(torch.zeros(1, 1, 1, 1, device=device), slots, slots)
    except Exception as error:  # of the compiler, too
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning(
            f"Triton cannot launch a kernel on {device} ({what}), so torch's own operators run, "
            "which are slower; install a C compiler and Python's headers (gcc, python3-dev)."
        )
        return f"its kernel cannot be launched ({what})"
    return None


@cache
def no_kernel(
    device: torch.device, dtype: torch.dtype = torch.float32, size: int = 0
) -> str | None:
    """Why no Triton kernel runs there; None where one does.

    Args:
        dtype, size: the keys' and the larger head dimension, for the kernel of attention.
    """
    if (reason := no_triton(device)) is not None:
        return reason
    if dtype not in _KERNEL_TYPES:
        return f"its kernel knows no {dtype}"
    if size > _KERNEL_SIZE:
        return f"its kernel knows head dimensions to {_KERNEL_SIZE}, found {size}"
    return None
