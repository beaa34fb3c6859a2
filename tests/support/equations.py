"""What decoder layers compute, by their equations: one text at a time, without a cache."""

import torch
from torch import Tensor
from torch.nn import functional as F

EPS, THETA = 1e-5, 5_000.0
Tensors = dict[str, Tensor]


def rms(states: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(states: Tensor, first: int, share: float) -> Tensor:
    """Rotary positions first, first + 1, … of a share of the dimensions of states [T, H, d]."""
    size = int(share * states.shape[-1])
    states, rest = states[..., :size], states[..., size:]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    positions = torch.arange(first, first + len(states), dtype=torch.float64)
    angle = positions.view(-1, 1, 1) / THETA**exponents  # [T, 1, d / 2]
    left, right = states.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attended(
    own: Tensors,
    states: Tensor,
    seen: Tensor,
    size: int,
    share: float = 1.0,
    behind: Tensor | None = None,
) -> Tensor:
    """Attention of a layer with such tensors, with norms of queries and keys where it has them.

    Args:
        states: [T, ·]; seen: [T, S] bool; size: of a head; share: of it, that positions turn.
        behind: [S - T, ·], what stands before the states, and is read alone.
    """
    every = states if behind is None else torch.cat([behind, states])
    query, key, value = (
        F.linear(read, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, size))
        for name, read in (("q", states), ("k", every), ("v", every))
    )  # [T, H, d], [S, KV, d] twice
    if "self_attn.q_norm.weight" in own:
        query = rms(query, own["self_attn.q_norm.weight"])
        key = rms(key, own["self_attn.k_norm.weight"])
    query, key = rotated(query, len(every) - len(states), share), rotated(key, 0, share)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
    return F.linear(mixed, own["self_attn.o_proj.weight"])


def gated(own: Tensors, states: Tensor) -> Tensor:
    """A layer's MLP."""
    gate, up = (F.linear(states, own[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"])
