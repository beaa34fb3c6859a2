"""The children of one node, tried in the order in which they were drawn, for the sampling rules.

One row of the vocabulary is held for each row of the batch, never one per node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads import TokenTree
from headstart.heads.core import Stream

from .decisions import accept_probability, normalise, residual, without
from .rule_api import Verified


@dataclass(slots=True)
class State:
    """What is left at a node while its children are tried.

    Attributes:
        p: [B, V], what the target still wants there.
        q: [B, V], what the next child was drawn from; None when no node of the tree was drawn.
        weight: [B], the share of the drafts that shall still be accepted here or below; 1 but in
            traversal.
    """

    p: Tensor
    q: Tensor | None
    weight: Tensor


def verdicts(verified: Verified) -> Tensor:
    """A round's uniforms [B, N + 1]: one to judge each node, and one for the last token."""
    draws = verified.tree.nodes + 1
    at = verified.lengths.unsqueeze(1)
    return verified.sampling.uniforms(at, draws, Stream.VERDICTS).squeeze(1)


def child_at(tree: TokenTree, node: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The child of each row's node [B, 1] that was drawn after `order` others.

    Returns:
        [B, 1], and [B] bool, whether there is one that may be accepted.
    """
    mine = (tree.topology.parents == node) & (tree.topology.rank == order)
    if tree.valid is not None:
        mine = mine & tree.valid
    return mine.byte().argmax(1, keepdim=True), mine.any(1)


def attempt(tree: TokenTree, state: State, child: Tensor, there: Tensor) -> tuple[Tensor, State]:
    """The probability [B] of accepting a child, and what is left once it is rejected.

    Args:
        child: [B, 1], a node.
        there: [B] bool, the rows that have it; the others get probability 0 and keep their state.
    """
    p, q, weight = state.p, state.q, state.weight
    token = tree.tokens.gather(1, child)  # [B, 1]
    p_x = p.gather(1, token).squeeze(1)
    if q is None:
        probability = accept_probability(p_x, torch.ones_like(p_x), weight)
        left, new = normalise((weight.unsqueeze(1) * p).scatter_(1, token, 0), p, weight)
    else:
        point = (tree.proposal_row.gather(1, child) < 0).squeeze(1)  # [B]
        q_x = q.gather(1, token).squeeze(1).masked_fill(point, 1)
        probability = accept_probability(p_x, q_x, weight)
        one_hot = q.masked_fill(point.unsqueeze(1), 0).scatter_(1, token, q_x.unsqueeze(1))
        left, new = residual(p, one_hot, weight)
        if not tree.replacement:
            drawn = (there & ~point).unsqueeze(1)
            q = torch.where(drawn, without(q, token.squeeze(1)), q)
    left = torch.where(there.unsqueeze(1), left, p)
    new = torch.where(there, new, weight)
    return probability.masked_fill(~there, 0), State(left, q, new)


def proposal(verified: Verified, node: Tensor) -> Tensor | None:
    """What the children of each row's node [B, 1] were drawn from, [B, V]; None for point masses.

    Zeros where the drafter gave no distribution, so that nothing drawn from it is accepted.
    """
    tree = verified.tree
    if tree.logits is None:
        return None
    rows = tree.proposal_row.masked_fill(tree.topology.parents != node, -1)  # [B, N]
    return _distribution(verified, rows.amax(1))  # siblings share it, but for point masses


def proposal_from(verified: Verified, order: int) -> Tensor | None:
    """What the root's children from `order` on were drawn from, see `TokenTree.turns`.

    Their drafter drew independently of those before it, so it begins with all of its q.
    """
    tree = verified.tree
    if tree.logits is None:
        return None
    assert tree.topology.children is not None, "drawn children in a tree that the host cannot see"
    return _distribution(verified, tree.proposal_row[:, tree.topology.children[0][order]])


def _distribution(verified: Verified, row: Tensor) -> Tensor:
    """A row [B] of the proposals as probabilities over the target's vocabulary, [B, V]."""
    tree, width = verified.tree, verified.logits.shape[-1]
    assert tree.logits is not None
    row = row.clamp(min=0).view(-1, 1, 1)
    logits = tree.logits.gather(1, row.expand(-1, -1, tree.logits.shape[-1])).squeeze(1)
    q = verified.sampling.warp(logits).softmax(-1).nan_to_num(0)  # [B, Vd]
    if tree.vocabulary is not None:
        return q.new_zeros(len(q), width).index_copy_(1, tree.vocabulary, q)
    missing = width - q.shape[1]
    return torch.nn.functional.pad(q, (0, missing)) if missing else q
