"""The machine that figures hold for: hardware, driver and libraries."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import __version__

if TYPE_CHECKING:
    import torch


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures hold for: the hardware, the driver and the libraries."""
    import torch

    from headstart.heads.artifacts.manifest import library_versions
    from headstart.heads.artifacts.plan import device_name

    found: dict[str, Any] = {
        "device": device_name(device),
        "processor": _processor(),
        "versions": {"headstart": __version__, **library_versions()},
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The GPU driver's version, from its own tool."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
