"""Rejection sampling over a tree of drafted tokens: the rule `rejection`.

At a node the target wants a token from p and the drafter drew a child x from q. The child is
accepted with probability min(1, p(x) / q(x)); after a rejection the target wants a token from the
residual (p − q)+, normalised, and the next child is tried against that. When no child is left, the
token is drawn from what p has become. The emitted text has exactly the target's distribution
(Leviathan et al. 2023, arXiv 2211.17192; trees with replacement: Miao et al. 2024, SpecInfer, arXiv
2305.09781; without replacement: Chen et al. 2024, Sequoia, arXiv 2402.12374). A child that was not
drawn but chosen, such as a top-k token, is a point mass: its q is 1 at the child itself.

The proof needs only that each child was drawn from its q, whatever was drawn before it. So the
children of several drafters may stand below one parent, one drafter's after the other's: each is
tried with its own drafter's q, against what the earlier ones have left of p. Duplicate siblings
are kept: to drop one would change what it was drawn from.
"""

import torch

from headstart.heads.core import draw

from .rule_api import Accepted, Verified
from .siblings import State, accepts, attempt, child_at, proposal, proposal_from, verdicts


def rejection(verified: Verified) -> Accepted:
    """Walk down from the root, trying the children of each accepted node in the order drawn."""
    tree, uniforms = verified.tree, verdicts(verified)
    depth = tree.topology.max_depth
    node = torch.zeros_like(tree.tokens[:, :1])  # [B, 1]
    alive = torch.ones_like(node, dtype=torch.bool)
    p = verified.logits.new_zeros(len(node), verified.logits.shape[-1])
    for level in range(depth + 1):
        scores = verified.scores_at(node, level, alive)
        if scores is None:
            break
        # Rows that are done keep what their last token will be drawn from.
        p = torch.where(alive, scores.softmax(-1), p)
        if level == depth:
            break
        open_ = alive.squeeze(1)  # [B], still without an accepted child at this level
        state, taken = State(p, proposal(verified, node), torch.ones_like(p[:, 0])), node
        for order in range(tree.topology.widths[level]):
            child, there = child_at(tree, node, order)
            there = there & open_
            if level == 0 and order in tree.turns:
                state.q = proposal_from(verified, order)
            probability, state = attempt(tree, state, child, there)
            yes = accepts(uniforms.gather(1, child).squeeze(1), probability)
            taken = torch.where(yes.unsqueeze(1), child, taken)
            open_ = open_ & ~yes
        p, alive, node = state.p, alive & (taken != node), taken
        token = tree.tokens.gather(1, node)  # [B, 1]
        if (ends := verified.ends(token)) is not None:
            alive = alive & ~ends
        verified.write(level, token)
    return Accepted.up_to(tree, node, draw(p, uniforms[:, -1:]))
