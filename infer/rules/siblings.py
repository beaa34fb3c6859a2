"""The children of one node, tried in the order in which they were drawn, for the sampling rules.

Decisions work in the dtype of their input; `rejection` and `traversal` name the sources. One row of
the vocabulary is held for each row of the batch, never one per node.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import TokenTree
from headstart.heads.core import Stream

from .rule_api import Verified


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


def verdicts(verified: Verified) -> Tensor:
    """A round's uniforms [B, N + 1]: one to judge each node, and one for the last token."""
    draws, at = verified.tree.nodes + 1, verified.lengths.unsqueeze(1)
    return verified.sampling.uniforms(at, draws, Stream.VERDICTS).squeeze(1)


@dataclass(slots=True)
class State:
    """What is left at a node while its children are tried."""

    p: Tensor  # [B, V], what the target still wants there
    q: Tensor | None  # [B, V], what the next child is from; None when no node of the tree was drawn
    weight: Tensor  # [B], see `accept_probability`


def child_at(tree: TokenTree, node: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The child [B, 1] of each row's node [B, 1] that was drawn after `order` others.

    And [B] bool, whether there is one that may be accepted.
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
    return _distribution(verified, tree.logits, rows.amax(1))  # siblings share it, or are points


def proposal_from(verified: Verified, order: int) -> Tensor | None:
    """What the root's children from `order` on were drawn from, see `TokenTree.turns`.

    Their drafter drew independently of those before it, so it begins with all of its q.
    """
    tree, children = verified.tree, verified.tree.topology.children
    if tree.logits is None:
        return None
    assert children is not None, "drawn children in a tree that the host cannot see"
    return _distribution(verified, tree.logits, tree.proposal_row[:, children[0][order]])


def _distribution(verified: Verified, logits: Tensor, row: Tensor) -> Tensor:
    """A row [B] of the proposals as probabilities over the target's vocabulary, [B, V]."""
    vocabulary, width = verified.tree.vocabulary, verified.logits.shape[-1]
    row = row.clamp(min=0).view(-1, 1, 1).expand(-1, -1, logits.shape[-1])
    q = verified.sampling.warp(logits.gather(1, row).squeeze(1)).softmax(-1).nan_to_num(0)
    if vocabulary is not None:
        return q.new_zeros(len(q), width).index_copy_(1, vocabulary, q)
    return pad(q, (0, width - q.shape[1])) if q.shape[1] < width else q
