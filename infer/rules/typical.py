"""Typical acceptance, Medusa's rule `typical`: approximate, it does not keep the distribution.

Source: Cai et al. 2024, Medusa, arXiv 2401.10774, section 2.3.1. A drafted token is accepted when
the target finds it typical enough, whatever the drafter thought of it: the text is neither the
target's own sample nor its greedy text.
"""

import torch
from torch import Tensor

from headstart.heads.core import argmax

from .rule_api import Accepted, Verified

EPSILON, DELTA = 0.09, 0.3


def typical(verified: Verified, epsilon: float = EPSILON, delta: float = DELTA) -> Accepted:
    """Accept the longest path of typical tokens, and go on with the target's best token.

    Approximate: this rule changes the distribution of the text. A token x after a node is typical
    when p(x) > min(epsilon, delta · exp(−H)), with p the target's processed distribution there and
    H its entropy in nats. Of paths of one length the likeliest is accepted. No processor may
    read the text. Unlike Medusa, H is taken without adding 1e-5 inside its logarithm.
    """
    tree, shape = verified.tree, verified.tree.topology
    good, likelihood = typical_nodes(verified, epsilon, delta)
    above = shape.ancestors  # [B, N, N]
    whole = (good.unsqueeze(1) | ~above).all(2)  # [B, N], all nodes on the way are typical
    total = (likelihood.unsqueeze(1) * above).sum(2)  # [B, N]
    depth = shape.depth.masked_fill(~whole, -1)
    longest = depth == depth.amax(1, keepdim=True)
    node = total.masked_fill(~longest, -torch.inf).argmax(1, keepdim=True)
    return Accepted.up_to(tree, node, argmax(verified.scores_after(node)).unsqueeze(1))


def typical_nodes(verified: Verified, epsilon: float, delta: float) -> tuple[Tensor, Tensor]:
    """Which nodes are typical after their parent, and their log-likelihoods, else 0; [B, N] both.

    The root is typical.
    """
    tree, shape = verified.tree, verified.tree.topology
    good = torch.zeros_like(tree.tokens, dtype=torch.bool)
    likelihood = torch.zeros(tree.tokens.shape, dtype=verified.sampling.dtype, device=good.device)
    good[:, 0] = True
    for number in range(tree.nodes):
        if shape.children is not None and not shape.children[number]:
            continue
        p = verified.scores_after(torch.full_like(tree.tokens[:, :1], number)).softmax(-1)
        bar = (delta * torch.exp(-torch.special.entr(p).sum(1, keepdim=True))).clamp(max=epsilon)
        each = p.gather(1, tree.tokens)  # [B, N]
        mine = (shape.parents == number) & (each > bar)
        good = good | mine
        likelihood = torch.where(mine, each.log(), likelihood)
    return good if tree.valid is None else good & tree.valid, likelihood
