"""How fast a device copies its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.infer.measure.timing import interleaved, medians

_BURST = 4


def copy_bandwidth(device: torch.device, megabytes: Sequence[int], repeats: int) -> dict[str, Any]:
    """How fast the device copies its own memory, read and written bytes both counted.

    Args:
        megabytes: MiB of each copy; they take turns.

    Returns:
        `gb_per_s`, that of the largest copy, 1e9 bytes a second, median; `by_megabytes`.
    """
    copies = {}
    for size in megabytes:
        source = torch.ones(size << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copies[size] = lambda source=source, target=target: target.copy_(source)
    taken = medians(interleaved(copies, device, repeats, _BURST))
    speed = {size: 2 * (size << 20) / (ms * 1e6) for size, ms in taken.items()}
    return {"gb_per_s": speed[max(megabytes)], "by_megabytes": speed}
