"""What this machine's processor has: cores for threads, and types that it computes in fast."""

import ctypes
import os
import re
from functools import cache
from typing import Any

import psutil
import torch

_BUSY = 1.5  # load for each core, above what a program that ran just before leaves
_WAITS = "OMP_WAIT_POLICY"
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


def said_of_busy_cores() -> str:
    """What helps where other programs use the cores as well; empty where they do not.

    Threads that wait for each other then keep cores from those that they wait for.
    """
    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if torch.get_num_threads() == 1 or os.environ.get(_WAITS) or load <= _BUSY * cores:
        return ""
    return (
        f"Other programs keep the cores busy (a load of {load:.0f} on {cores}), where decoding is "
        f"several times as fast with {_WAITS}=passive in the environment."
    )


def openmp_library() -> str | None:
    """The file of the library whose threads torch runs on, where the system tells."""
    try:
        with open("/proc/self/maps") as maps:
            found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps.read())
    except OSError:
        return None
    return None if found is None else found[0]


_HARD = 2  # OpenMP's number of the pause that ends the threads


@cache
def _gnu_openmp() -> Any:
    path = openmp_library()
    library = ctypes.CDLL(path) if path and "libgomp" in path else None
    return library if hasattr(library, "omp_pause_resource_all") else None


def release_threads() -> None:
    """End the threads that wait for the calling thread's next parallel work, which starts others.

    GNU's OpenMP keeps some for each thread that ever had such work. While all of them together are
    more than the cores, its threads sleep wherever they wait, and decoding takes twice as long.
    """
    if (library := _gnu_openmp()) is not None:
        library.omp_pause_resource_all(_HARD)


def has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16, rather than by float32."""
    if not torch.backends.mkldnn.is_available():
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    tests = [getattr(torch.cpu, name) for name in names if hasattr(torch.cpu, name)]
    tests = tests or [torch.ops.mkldnn._is_mkldnn_bf16_supported]
    return any(bool(test()) for test in tests)


def free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that nothing uses; None for other devices, of which it is not known."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def total_bytes(device: torch.device) -> int | None:
    """All memory of a GPU, or of this machine for a CPU; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
