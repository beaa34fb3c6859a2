"""Where the Triton kernels run, and the reason where they do not."""

import importlib.util
from functools import cache

import torch

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_SIZE = 256


@cache
def no_triton(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a device; None where one does."""
    if device.type != "cuda":
        return f"its kernel runs on CUDA, and the keys are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    return None


@cache
def no_kernel(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Why the kernel cannot run there; None where it can.

    Args:
        size: the larger head dimension.
    """
    if (reason := no_triton(device)) is not None:
        return reason
    if dtype not in _KERNEL_TYPES:
        return f"its kernel knows no {dtype}"
    if size > _KERNEL_SIZE:
        return f"its kernel knows head dimensions to {_KERNEL_SIZE}, found {size}"
    return None
