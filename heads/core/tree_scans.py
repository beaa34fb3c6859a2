"""Recurrences over a token tree: each node reads the state that its own path would have left.

A scan over a text computes, for a chunk of tokens, how each reads the state before the chunk and
the tokens before it. On a tree those tokens are its ancestors, so with the ancestor mask in the
place of the causal one, and sums of log-decays along paths in the place of cumulative ones, a whole
tree is one chunk: a few products, and no state for each node is ever made. The state itself does
not change; what nodes would add to it is returned, see `recurrent`. Nodes may also run level by
level, as a drafter grows a tree: the last N of G nodes, behind what the others would add.

Sources: the chunked forms of gated delta networks (Yang et al., arXiv 2412.06464), Kimi Delta
Attention (arXiv 2510.26692), and Mamba-2 (Dao and Gu, arXiv 2405.21060); for trees, STree (Wu et
al., arXiv 2505.14969), which does this for Mamba-2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .recurrent import TreeRun, Updates


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, tree: TreeRun
) -> Tensor:
    """A causal convolution, channel by channel, at each node: [B, C, N].

    Args:
        inputs: [B, C, W - 1 + G], those kept of the text and then the nodes'.
        weight: [C, W]; bias: [C].
        activation: a function's name, or None.
    """
    width = weight.shape[-1]
    windows = tree.windows(width)[:, tree.first :].to(inputs.device).flatten(1)  # [B, N * W]
    read = inputs.gather(2, windows.unsqueeze(1).expand(-1, inputs.shape[1], -1))
    channels = inputs.shape[1]
    out = F.conv1d(
        read.to(weight.dtype), weight.unsqueeze(1), bias, stride=width, groups=channels
    )  # [B, C, N]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(inputs.dtype)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    normalize: bool,
    tree: TreeRun,
    before: Updates | None = None,
) -> tuple[Tensor, Updates]:
    """The gated delta rule: what each node reads, [B, N, H, Dv], and what all G would add.

    A token decays the state by exp(g), and then moves what its key reads of it towards its value:
    S := S + beta * k (v - Sᵀk)ᵀ. What each node moves depends on what its ancestors did: a system
    of equations that is solved level by level, the nodes of depth d in step d.

    Args:
        query, key: [B, N, H, Dk], or with fewer heads that several values share.
        value: [B, N, H, Dv].
        g: [B, N, H], the log-decay; or [B, N, H, Dk], one for each channel of the key.
        beta: [B, N, H].
        state: [B, H, Dk, Dv].
        normalize: whether queries and keys are first made of length 1.
        before: of the nodes that ran before, if any.
    """
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query, key = (each.repeat_interleave(groups, dim=2) for each in (query, key))
    dtype = torch.promote_types(value.dtype, torch.float32)
    query, key, value, beta = (
        each.transpose(1, 2).to(dtype) for each in (query, key, value, beta)
    )  # [B, H, N, …]
    if normalize:
        query, key = (
            each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key)
        )
    query = query * query.shape[-1] ** -0.5
    g = g.transpose(1, 2).to(dtype)
    g = g.unsqueeze(-1) if g.dim() == 3 else g  # [B, H, N, 1 or Dk]
    g = _with(before and before.g, g)
    decay, between = _decays(g, tree)
    kept = decay[:, :, tree.first :].exp()  # of the state, by the N nodes
    state, keys, beta = state.to(dtype), _with(before and before.left, key), beta.unsqueeze(-1)

    moved = wanted = beta * (value - (key * kept) @ state)  # [B, H, N, Dv]
    if before is not None or tree.levels:
        scores = _scores(key * beta, keys, between)  # [B, H, N, G]
        if before is not None:
            moved = wanted = wanted - scores[..., : tree.first] @ before.right
        scores = scores[..., tree.first :].tril(-1)
        for _ in range(tree.levels):  # right for one more level after each step
            moved = wanted - scores @ moved
    moved = _with(before and before.right, moved)
    out = (query * kept) @ state + _scores(query, keys, between) @ moved
    return out.transpose(1, 2).contiguous(), Updates(keys, moved, g, decay)


def state_space(
    inputs: Tensor,
    step: Tensor,
    rate: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor | None,
    state: Tensor,
    tree: TreeRun,
    before: Updates | None = None,
) -> tuple[Tensor, Updates]:
    """Mamba-2's state space: what each node reads, [B, N, H, P], and what all G would add.

    Args:
        inputs: [B, N, H, P], x; step: [B, N, H], dt, positive.
        rate: [H], A, negative.
        keys, queries: [B, N, G, S], B and C, shared by H / G heads each.
        skip: [H], D, or None.
        state: [B, H, P, S].
        before: of the nodes that ran before, if any.
    """
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    groups = inputs.shape[2] // keys.shape[2]
    keys, queries = (
        each.to(dtype).repeat_interleave(groups, dim=2).transpose(1, 2) for each in (keys, queries)
    )  # [B, H, N, S]
    given = inputs.to(dtype).transpose(1, 2)  # [B, H, N, P]
    step = step.to(dtype).transpose(1, 2).unsqueeze(-1)  # [B, H, N, 1]
    g = _with(before and before.g, step * rate.to(dtype).view(-1, 1, 1))
    decay, between = _decays(g, tree)
    kept = decay[:, :, tree.first :].exp()
    added, keys = _with(before and before.left, given * step), _with(before and before.right, keys)
    read = _scores(queries, keys, between) @ added  # [B, H, N, P]
    out = read + (queries * kept) @ state.to(dtype).transpose(-1, -2)
    if skip is not None:
        out = out + given * skip.to(dtype).view(-1, 1, 1)
    return out.transpose(1, 2).contiguous(), Updates(added, keys, g, decay)


def _with(before: Tensor | None, new: Tensor) -> Tensor:
    """What nodes that ran before have, and new ones, [B, H, G, …]."""
    return new if before is None else torch.cat([before, new], 2)


def _decays(g: Tensor, tree: TreeRun) -> tuple[Tensor, Tensor]:
    """Log-decays [B, H, G, D] summed from the root to each node, and the decay between nodes.

    Returns:
        [B, H, G, D]; and [B, H, N, G, D], entry (i, j) what remains at node i of what its ancestor
        j added: 0 where j is none of its ancestors, 1 at itself.
    """
    ancestors = tree.ancestors.to(g.device)[:, None, :, :, None]  # [B, 1, G, G, 1]
    decay = (ancestors * g.unsqueeze(2)).sum(3)  # [B, H, G, D]
    apart = decay[:, :, tree.first :].unsqueeze(3) - decay.unsqueeze(2)  # [B, H, N, G, D]
    return decay, apart.masked_fill(~ancestors[:, :, tree.first :], -torch.inf).exp()


def _scores(readers: Tensor, writers: Tensor, between: Tensor) -> Tensor:
    """[B, H, N, G]: the products of vectors of N and of G nodes, decayed in between."""
    if between.shape[-1] == 1:
        return (readers @ writers.transpose(-1, -2)) * between.squeeze(-1)
    return (readers.unsqueeze(3) * writers.unsqueeze(2) * between).sum(-1)
