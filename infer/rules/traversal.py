"""Traversal verification: the rules `traversal`, for trees, and `block`, for chains.

Traversal verification (Weng et al. 2025, arXiv 2505.12398) judges a tree from its leaves to its
root, so that a whole path may be accepted although a token on it would have been rejected by
itself; on a chain it is block verification (Sun et al. 2024, arXiv 2403.10444). The text has
exactly the target's distribution, and no fewer tokens are accepted than by `rejection`.

Each node v has a weight w: given that v was drafted, the round shall end in v or below with
probability w, and with the target's distribution there. The root's weight is 1. Let p be the
target's distribution after v and q what the first child x was drawn from. Then x gets the weight
min(w · p(x) / q(x), 1), which leaves (w · p − q)+ to be drawn from v when all of x's subtree is
rejected. With m its mass, that happens for a share m + 1 − w of the drafts, so v goes on with the
residual as p and the weight m / (m + 1 − w) until its children are used up; a leaf keeps w. What
a child leaves does not depend on the outcomes in its subtree, so all the weights are found from the
root down, one node's p and q at a time. Then every node is flagged with its last weight, the root
always, and the first flagged node in post-order is accepted; the last token is drawn from what
its children left of its p.

On one drafted token with p = (0.5, 0.5) and q = (1, 0) the token 0 has weight 0.5, and if it is not
flagged the root is left with (0, 1): as in rejection sampling. Below it, with p = q, token 1's
weight is 0.5 too: it is accepted with token 0, half of the time, never token 0 alone.
"""

from itertools import accumulate

import torch
from torch import Tensor

from headstart.heads import Topology
from headstart.heads.core import draw

from .levels import at_once, judge_all
from .rule_api import Accepted, Verified
from .siblings import State, accepts, attempt, child_at, proposal, proposal_from, verdicts


def traversal(verified: Verified) -> Accepted:
    """Accept the first flagged node in post-order; processors may not read the text."""
    if at_once(verified):
        return _by_level(verified)
    tree, uniforms = verified.tree, verdicts(verified)
    before, after = node_weights(verified)
    flagged = accepts(uniforms[:, :-1], after)  # [B, N]
    flagged[:, 0] = True
    node = first_flagged(tree.topology, flagged)
    state = _state_before_children(verified, node, before)
    for order in range(tree.topology.width):
        child, there = child_at(tree, node, order)
        if order in tree.turns and (q := proposal_from(verified, order)) is not None:
            assert state.q is not None
            state.q = torch.where(node == 0, q, state.q)
        _, state = attempt(tree, state, child, there)
    return Accepted.up_to(tree, node, draw(state.p, uniforms[:, -1:]))


def _by_level(verified: Verified) -> Accepted:
    """The same with all weights known a level at a time."""
    tree, uniforms = verified.tree, verdicts(verified)
    _, after, left, side = judge_all(verified)
    flagged = accepts(uniforms[:, :-1], after)  # [B, N]
    flagged[:, 0] = True
    node = first_flagged(tree.topology, flagged)
    rows = torch.arange(len(node), device=node.device).unsqueeze(1) * tree.nodes  # [B, 1]
    rows = (side.gather(1, node) * side.numel() + rows + node).squeeze(1)
    p = left.flatten(0, 2).index_select(0, rows)  # [B, V]
    return Accepted.up_to(tree, node, draw(p, uniforms[:, -1:]))


def node_weights(verified: Verified) -> tuple[Tensor, Tensor]:
    """Each node's weight before its children and after them, [B, N] both; 0 where it is invalid."""
    tree = verified.tree
    shape, starts = tree.topology, None
    if shape.children is not None:  # the steps at which the children of another node begin
        starts = {1, *accumulate((len(kids) for kids in shape.children if kids), initial=1)}
    before = torch.ones(tree.tokens.shape, dtype=verified.sampling.dtype, device=tree.tokens.device)
    after = before.clone()
    # Siblings side by side, by their parent.
    grouped = shape.parents.argsort(dim=1, stable=True)  # [B, N]
    everywhere = torch.ones_like(tree.tokens[:, 0], dtype=torch.bool)
    state = None
    for step in range(1, tree.nodes):
        child = grouped[:, step : step + 1]  # [B, 1]
        parent = shape.parents.gather(1, child)
        if starts is None or step in starts:
            begun = _state_before_children(verified, parent, before)
            if state is not None and starts is None:
                begun = _choose(shape.rank.gather(1, child) == 0, begun, state)
            state = begun
        assert state is not None
        if step - 1 in tree.turns:  # the root's children come first
            state.q = proposal_from(verified, step - 1)
        there = everywhere if tree.valid is None else tree.valid.gather(1, child).squeeze(1)
        weight, state = attempt(tree, state, child, there)
        before.scatter_(1, child, weight.unsqueeze(1))
        after.scatter_(1, child, weight.unsqueeze(1))
        after.scatter_(1, parent, state.weight.unsqueeze(1))
    return before, after


def first_flagged(shape: Topology, flagged: Tensor) -> Tensor:
    """The first flagged node [B, 1] in post-order; `flagged` [B, N] holds for the root.

    >>> shape = Topology.from_parents(torch.tensor([[-1, 0, 0, 1, 1]]), max_depth=2)
    >>> first_flagged(shape, torch.tensor([[1, 1, 1, 0, 1]]) > 0).item()
    4
    """
    at_or_below = (shape.ancestors & flagged.unsqueeze(2)).any(1)  # [B, N]
    node = torch.zeros_like(shape.parents[:, :1])
    for _ in range(shape.max_depth):
        below = (shape.parents == node) & at_or_below
        first = below.byte().argmax(1, keepdim=True)
        node = torch.where(below.any(1, keepdim=True), first, node)
    return node


def _state_before_children(verified: Verified, node: Tensor, weights: Tensor) -> State:
    p = verified.scores_after(node).softmax(-1)
    return State(p, proposal(verified, node), weights.gather(1, node).squeeze(1))


def _choose(first: Tensor, begun: State, state: State) -> State:
    """`begun` in the rows where `first` [B, 1] holds, `state` elsewhere."""
    q = None if begun.q is None or state.q is None else torch.where(first, begun.q, state.q)
    weight = torch.where(first.squeeze(1), begun.weight, state.weight)
    return State(torch.where(first, begun.p, state.p), q, weight)
