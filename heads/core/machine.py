"""What this machine's processor has: cores for threads, and types that it computes in fast."""

import os

import psutil
import torch

_ASKED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def physical_cores() -> int:
    """Cores that this process may run on; two threads of one core count once."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1 << 20
    return max(min(psutil.cpu_count(logical=False) or 1, allowed), 1)


def use_physical_cores() -> int:
    """Have torch run on so many threads, unless the environment says how many; returns them.

    A second thread on a core reads memory no faster, and each waits for the other.
    """
    if not any(os.environ.get(name) for name in _ASKED):
        torch.set_num_threads(min(torch.get_num_threads(), physical_cores()))
    return torch.get_num_threads()


def has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16, rather than by float32."""
    if not torch.backends.mkldnn.is_available():
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    tests = [getattr(torch.cpu, name) for name in names if hasattr(torch.cpu, name)]
    tests = tests or [torch.ops.mkldnn._is_mkldnn_bf16_supported]
    return any(bool(test()) for test in tests)
