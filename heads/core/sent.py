"""Numbers of the host, sent to where a model runs."""

import torch
from torch import Tensor


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, by one copy that nothing waits for.

    A copy from other memory than pinned waits for all that runs on the GPU. Torch gives the pinned
    memory to nobody before the copy's end.
    """
    if device.type != "cuda":
        return numbers.to(device)
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return pinned.copy_(numbers).to(device, non_blocking=True)
