"""Rejection sampling over a tree of drafted tokens: the rule `rejection`, and its two decisions.

At a node the target wants a token from p and the drafter drew a child x from q. The child is
accepted with probability min(1, p(x) / q(x)); after a rejection the target wants a token from the
residual (p − q)+, normalised, and the next child is tried against that. When no child is left, the
token is drawn from what p has become. The emitted text has exactly the target's distribution
(Leviathan et al. 2023, arXiv 2211.17192; trees with replacement: Miao et al. 2024, SpecInfer, arXiv
2305.09781; without replacement: Chen et al. 2024, Sequoia, arXiv 2402.12374). A child that was not
drawn but chosen, such as a top-k token, is a point mass: its q is 1 at the child itself.

Nothing above asks where a child came from, only that it was drawn from its q whatever was drawn
before it. So the children of several drafters may stand below one parent, one drafter's after the
other's: each is tried with its own drafter's q, against what the earlier ones have left of p. Twins
stay twins; to drop one would change what it was drawn from.

Every decision is `accept_probability`, `residual`, `without`, `accepts` or `draw`, in the dtype of
`Sampling`. Only one row of the vocabulary is held for each row of the batch, never one per node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads import TokenTree
from headstart.heads.core import Stream, draw

from .rule_api import Accepted, Verified


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


def residual(p: Tensor, q: Tensor, weight: Tensor | float = 1) -> tuple[Tensor, Tensor]:
    """What the target still wants after a token drawn from q was rejected.

    Args:
        p, q: [B, V].
        weight: [B] or a number, see `accept_probability`.

    Returns:
        The distribution (weight · p − q)+ / m [B, V] with m its mass, NaN where p or q is; p itself
        where m is 0, which only rounding can reach. And the new weight m / (m + 1 − weight) [B].

    >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([[0.75, 0.0, 0.25]]).double()
    >>> [found.tolist() for found in residual(p, q)]
    [[[0.0, 1.0, 0.0]], [1.0]]
    >>> [found.tolist() for found in residual(p, q, torch.tensor([0.5]).double())]
    [[[0.0, 1.0, 0.0]], [0.3333333333333333]]
    """
    return _normalise((_column(weight) * p - q).clamp_(min=0), p, weight)


def without(q: Tensor, token: Tensor) -> Tensor:
    """The proposal q [B, V] after `token` [B] was drawn and put aside; zeros when nothing is left.

    >>> without(torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]), torch.tensor([0, 1])).tolist()
    [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]
    """
    left = q.scatter(1, token.unsqueeze(1), 0)
    mass = left.sum(1, keepdim=True)
    return left.div_(mass.masked_fill(mass == 0, 1))


def accepts(uniforms: Tensor, index: Tensor | int, probability: Tensor) -> Tensor:
    """Whether the uniform at `index` [B] (or the same for all rows) is below `probability` [B].

    Args:
        uniforms: [B, M] in (0, 1).

    Returns:
        [B] bool; False where the probability is NaN.
    """
    if isinstance(index, int):
        return uniforms[:, index] < probability
    return uniforms.gather(1, index.unsqueeze(1)).squeeze(1) < probability


def rejection(verified: Verified) -> Accepted:
    """Walk down from the root, trying the children of each accepted node in the order drawn."""
    tree, uniforms = verified.tree, verdicts(verified)
    node = torch.zeros_like(tree.tokens[:, :1])  # [B, 1]
    alive = torch.ones_like(node, dtype=torch.bool)
    p = verified.logits.new_zeros(len(node), verified.logits.shape[-1])
    for level in range(tree.topology.max_depth + 1):
        scores = verified.scores_at(node, level, alive)
        if scores is None:
            break
        # Rows that are done keep what their last token will be drawn from.
        p = torch.where(alive, scores.softmax(-1), p)
        if level == tree.topology.max_depth:
            break
        open_ = alive.squeeze(1)  # [B], still without an accepted child at this level
        state, taken = State(p, proposal(verified, node)), node
        for order in range(tree.topology.widths[level]):
            child, there = child_at(tree, node, order)
            there = there & open_
            if level == 0 and order in tree.turns:
                state.q = turn(verified, order)
            probability, rejected = attempt(tree, state, child, there)
            yes = accepts(uniforms, child.squeeze(1), probability)
            state = rejected
            taken = torch.where(yes.unsqueeze(1), child, taken)
            open_ = open_ & ~yes
        p, alive = state.p, alive & (taken != node)
        node = taken
        token = tree.tokens.gather(1, node)  # [B, 1]
        if (ends := verified.ends(token)) is not None:
            alive = alive & ~ends
        verified.write(level, token)
    return finish(tree, node, draw(p, uniforms[:, -1:]))


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
    weight: Tensor | float = 1


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
        left, new = _normalise((_column(weight) * p).scatter_(1, token, 0), p, weight)
    else:
        point = (tree.proposal_row.gather(1, child) < 0).squeeze(1)  # [B]
        q_x = q.gather(1, token).squeeze(1).masked_fill(point, 1)
        probability = accept_probability(p_x, q_x, weight)
        one_hot = q.masked_fill(point.unsqueeze(1), 0).scatter_(1, token, q_x.unsqueeze(1))
        left, new = residual(p, one_hot, weight)
        if not tree.replacement:
            drawn = (there & ~point).unsqueeze(1)
            q = torch.where(drawn, without(q, token.squeeze(1)), q)
    if isinstance(weight, Tensor):
        weight = torch.where(there, new, weight)
    left = torch.where(there.unsqueeze(1), left, p)
    return probability.masked_fill(~there, 0), State(left, q, weight)


def proposal(verified: Verified, node: Tensor) -> Tensor | None:
    """What the children of each row's node [B, 1] were drawn from, [B, V]; None for point masses.

    Zeros where the drafter gave no distribution, so that nothing drawn from it is accepted.
    """
    tree = verified.tree
    if tree.logits is None:
        return None
    rows = tree.proposal_row.masked_fill(tree.topology.parents != node, -1)  # [B, N]
    return _distribution(verified, rows.amax(1))  # siblings share it, but for point masses


def turn(verified: Verified, order: int) -> Tensor | None:
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
    tree, sampling = verified.tree, verified.sampling
    assert tree.logits is not None
    row = row.clamp(min=0).view(-1, 1, 1)
    logits = tree.logits.gather(1, row.expand(-1, -1, tree.logits.shape[-1])).squeeze(1)
    q = sampling.warp(logits).softmax(-1).nan_to_num(0)  # [B, Vd]
    vocabulary, width = tree.vocabulary, verified.logits.shape[-1]
    if vocabulary is None and q.shape[1] == width:
        return q
    if vocabulary is None:
        vocabulary = torch.arange(q.shape[1], device=q.device)
    return q.new_zeros(len(q), width).index_copy_(1, vocabulary, q)


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


def finish(tree: TokenTree, node: Tensor, last: Tensor) -> Accepted:
    """Accept the path to each row's node [B, 1], and the token [B, 1] drawn after it."""
    shape = tree.topology
    path = shape.path_to(node.squeeze(1))  # [B, A]
    count = shape.steps_to.gather(1, node)  # [B, 1]
    after = torch.cat([tree.tokens.gather(1, path[:, 1:]), last], dim=1)  # [B, A]
    steps = torch.arange(shape.max_depth + 1, device=last.device)
    return Accepted(path, torch.where(steps + 1 < count, after, last), count.squeeze(1))


def _normalise(excess: Tensor, p: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    mass = excess.sum(1)
    empty = mass == 0
    left = excess.div_(mass.masked_fill(empty, 1).unsqueeze(1))
    # Weight 1 stays 1, also where mass and share are 0. Where p is NaN the weight stays what it is:
    # that node is accepted as often as any, and then the text ends with an error there.
    new = (mass / (mass + 1 - weight)).masked_fill(empty, 0)
    old = weight if isinstance(weight, Tensor) else torch.full_like(mass, weight)
    new = torch.where((old >= 1) | mass.isnan(), old, new)
    return torch.where(empty.unsqueeze(1), p, left), new


def _column(weight: Tensor | float) -> Tensor | float:
    return weight.unsqueeze(1) if isinstance(weight, Tensor) else weight
