"""The decisions of the sampling rules: accepting a token, and what is left once it is rejected.

They work in the dtype of their input; `rejection` and `traversal` name the sources.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_probability(p_x: Tensor, q_x: Tensor, weight: Tensor | float = 1) -> Tensor:
    """The probability of accepting a token, min(weight · p / q, 1); 0 where q is 0.

    Args:
        p_x, q_x: [B], what the target and the drafter give the token.
        weight: [B] or a number, the share of the drafts that shall be accepted; 1 but in traversal.

    Returns:
        [B]; NaN where p_x is NaN.

    >>> p_x, q_x = torch.tensor([0.2, 0.6, 0.6]), torch.tensor([0.8, 0.5, 0.0])
    >>> accept_probability(p_x, q_x).tolist()
    [0.25, 1.0, 0.0]
    """
    return (weight * p_x / q_x).masked_fill(q_x <= 0, 0).clamp(max=1)


def residual(p: Tensor, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the target still wants after a token drawn from q was rejected.

    Args:
        p, q: [B, V].
        weight: [B], see `accept_probability`.

    Returns:
        The distribution (weight · p − q)+ / m [B, V] with m its mass, NaN where p or q is; p itself
        where m is 0, which only rounding can reach. And the new weight m / (m + 1 − weight) [B].

    >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([[0.75, 0.0, 0.25]]).double()
    >>> [found.tolist() for found in residual(p, q, torch.tensor([1.0]).double())]
    [[[0.0, 1.0, 0.0]], [1.0]]
    >>> [found.tolist() for found in residual(p, q, torch.tensor([0.5]).double())]
    [[[0.0, 1.0, 0.0]], [0.3333333333333333]]
    """
    return normalise((weight.unsqueeze(1) * p - q).clamp_(min=0), p, weight)


def normalise(excess: Tensor, p: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The results of `residual` from (weight · p − q)+ [B, V], which is overwritten."""
    mass = excess.sum(1)  # [B]
    empty = mass == 0
    left = excess.div_(mass.masked_fill(empty, 1).unsqueeze(1))
    # Weight 1 stays 1, also where mass and share are 0. Where p is NaN the weight stays what it is:
    # that node is accepted as often as any, and then the text ends with an error there.
    new = (mass / (mass + 1 - weight)).masked_fill(empty, 0)
    new = torch.where((weight >= 1) | mass.isnan(), weight, new)
    return torch.where(empty.unsqueeze(1), p, left), new


def without(q: Tensor, token: Tensor) -> Tensor:
    """The proposal q [B, V] after `token` [B] was drawn and put aside; zeros when nothing is left.

    >>> without(torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]), torch.tensor([0, 1])).tolist()
    [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]
    """
    left = q.scatter(1, token.unsqueeze(1), 0)
    mass = left.sum(1, keepdim=True)
    return left.div_(mass.masked_fill(mass == 0, 1))


def accepts(uniforms: Tensor, probability: Tensor) -> Tensor:
    """Whether each uniform in (0, 1) is below its probability; False where that is NaN."""
    return uniforms < probability
