"""What a cache holds of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .recurrent import RecurrentShape
from .triton_here import no_kernel


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches: its place, and the shapes of its keys and values, (heads, size).

    A layer without attention has heads of no size; one that is recurrent keeps states, too.
    """

    device: torch.device
    dtype: torch.dtype
    key: tuple[int, int] = (0, 0)
    value: tuple[int, int] = (0, 0)
    recurrent: RecurrentShape | None = None

    @property
    def attends(self) -> bool:
        """Whether it caches keys and values."""
        return self.key[0] > 0

    @property
    def no_kernel(self) -> str | None:
        """See `no_kernel`."""
        if not self.attends:
            return None
        return no_kernel(self.device, self.dtype, max(self.key[1], self.value[1]))
