"""The cosines and sines of a rotary embedding as one launch, where transformers takes up to ten.

They depend on positions alone, so a forward computes them once for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused_writes import kernels_for
from .trial import nearly_equal

_CHANGING = ("dynamic", "longrope")  # kinds whose frequencies depend on the length
_TRIED = (0, 1, 77, 4096, 131_071)  # positions


@torch.library.custom_op("headstart::angles", mutates_args=())
def angles(
    positions: Tensor, frequencies: Tensor, scaling: float, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [B, N] times frequencies [D / 2], twice in a row: [B, N, D].

    They are computed in float32, multiplied by `scaling`, and rounded to the dtype of `states`.
    """
    if (kernels := kernels_for(states)) is not None:
        return kernels.angles(positions, frequencies, scaling, states.dtype)
    angle = positions.unsqueeze(-1).float() * frequencies.float()
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    return cos.to(states.dtype), sin.to(states.dtype)


def angles_of(module: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`angles` by the frequencies of a rotary embedding."""
    return angles(positions, module.inv_freq, float(module.attention_scaling), states)


def is_rotary(module: Any) -> bool:
    """Whether a module computes what `angles_of` does, which is tried."""
    frequencies = getattr(module, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or not hasattr(module, "attention_scaling"):
        return False
    if frequencies.dim() != 1 or frequencies.is_meta:
        return False
    if getattr(module, "rope_type", None) in _CHANGING:
        return False
    positions = torch.tensor([_TRIED], device=frequencies.device)
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.zeros(1, len(_TRIED), 1, dtype=dtype, device=frequencies.device)
        try:
            found = module(states, positions)
        except Exception:  # it has other arguments
            return False
        ours = angles_of(module, states, positions)
        if not isinstance(found, tuple) or len(found) != len(ours):
            return False
        if not all(nearly_equal(*pair) for pair in zip(found, ours, strict=True)):
            return False
    return True


def replaces(module: Any, states: Any, positions: Any) -> bool:
    """Whether a rotary embedding is called with what `angles_of` takes."""
    plain = isinstance(states, Tensor) and isinstance(positions, Tensor) and positions.dim() == 2
    return plain and states.device == positions.device == module.inv_freq.device
