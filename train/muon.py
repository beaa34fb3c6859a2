"""Muon for processors that are slow in bfloat16, in which torch's own computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.core.packing import onednn_packs


def muon(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for matrices [R, C] of one device, with a momentum of 0.95.

    Its iteration takes bfloat16 where a processor has instructions for it. A product takes twenty
    times as long as in float32 where there are none, as on processors with AVX2 alone.
    """
    weights = list(weights)
    slow = any(weight.is_cpu for weight in weights) and not onednn_packs(torch.bfloat16)
    kind = Float32Muon if slow else torch.optim.Muon
    return kind(weights, lr=rate, momentum=0.95, weight_decay=0.0)


class Float32Muon(torch.optim.Muon):
    """torch's Muon, whose iteration computes in the type of the gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                state, grad = self.state[weight], weight.grad
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grad)
                average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
                update = orthogonal(
                    grad.lerp(average, group["momentum"]),
                    group["ns_coefficients"], group["ns_steps"], group["eps"],
                )  # fmt: skip
                rate = group["lr"] * math.sqrt(max(1, weight.shape[0] / weight.shape[1]))
                weight.add_(update, alpha=-rate)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """A matrix [R, C] with its singular values brought near 1, by a Newton–Schulz iteration.

    The singular vectors stay. Each step takes a value x to a x + b x³ + c x⁵, of the coefficients.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
