"""The rules `greedy`, `match` and `coupled`: the target chooses, and nodes that agree are accepted.

The target chooses its token at every node by a fixed function of that node's own prefix (the
argmax, or the argmax after the noise of its position), and the longest path of nodes that agree
with those choices is accepted. The text is therefore the one that plain decoding writes with the
same choices, whatever the tree holds.
"""

import torch
from torch import Tensor

from headstart.heads import TokenTree
from headstart.heads.core.fused_products import has_kernels

from .levels import AT_ONCE
from .rule_api import Accepted, Verified

_AT_ONCE = 2**18  # up to so many logits all nodes are scored at once, else the walked path's
_HALF_RATE = {(8, 0), (9, 0), (10, 0)}
"""Capabilities of GPUs that compute float64, which noise is, at half the rate of float32. On others
the noise of all nodes takes longer than the launches of a walk."""


def matching(verified: Verified) -> Accepted:
    """Accept the longest path that the target chooses itself."""
    return accept_matches(verified.tree, target_choices(verified))


def target_choices(verified: Verified) -> Tensor:
    """The token that the target chooses after each node, [B, N]; -1 where its logits are NaN.

    Where processors read the text, or scores of all nodes would take much memory, nodes are scored
    level by level along the path that the choices follow; nodes off that path then get -1.
    """
    logits, sampling, kept = verified.logits, verified.sampling, verified.kept
    if sampling.seeds is None and not sampling.processors:
        # Like generate, compare in float32; narrower types keep their order.
        if kept is not None:
            kept.append(logits.float())
        return sampling.best(logits.float() if logits.dtype == torch.float64 else logits)
    positions = verified.lengths.unsqueeze(1) + verified.tree.topology.depth + 1  # [B, N]
    if not sampling.rowwise or logits.numel() > _most_at_once(logits):
        return _walk(verified, positions)
    processed = sampling.process_each(logits)
    if kept is not None:
        kept.append(processed)
    return sampling.choose(processed, positions)


def _most_at_once(logits: Tensor) -> int:
    """Up to so many logits all nodes are scored at once."""
    quick = has_kernels(logits) and torch.cuda.get_device_capability(logits.device) in _HALF_RATE
    return AT_ONCE if quick else _AT_ONCE


def _walk(verified: Verified, positions: Tensor) -> Tensor:
    """`target_choices` level by level; `positions` [B, N] of the tokens after the nodes."""
    tree, device = verified.tree, verified.logits.device
    batch, nodes = tree.tokens.shape
    node = torch.zeros(batch, 1, dtype=torch.long, device=device)  # [B, 1]
    alive = torch.ones_like(node, dtype=torch.bool)
    # Duplicate siblings have the same text, and each its own children: all of them are reached.
    reached = torch.arange(nodes, device=device) == node  # [B, N]
    below = tree.topology.parents == 0
    choices = torch.full((batch, nodes), -1, device=device)
    scored = torch.zeros_like(choices)  # [B, N] the node whose scores each node's choice is from
    for level in range(tree.topology.max_depth + 1):
        scores = verified.scores_at(node, level, alive)
        if scores is None:
            break
        token = verified.sampling.choose(scores.unsqueeze(1), positions.gather(1, node))  # [B, 1]
        choices = torch.where(reached, token, choices)
        if verified.kept is not None:
            scored = torch.where(reached, node, scored)
        reached = below & (tree.tokens == token)
        if tree.valid is not None:
            reached = reached & tree.valid
        token = token.clamp(min=0)
        if (ends := verified.ends(token)) is not None:
            reached = reached & ~ends
        verified.write(level, token)
        alive = reached.any(1, keepdim=True)
        below = reached.gather(1, tree.topology.parent_or_root)
        node = torch.where(alive, reached.byte().argmax(1, keepdim=True), node)
    if verified.kept:
        each = scored.unsqueeze(-1).expand(-1, -1, verified.kept[0].shape[-1])
        verified.kept[0] = verified.kept[0].gather(1, each)
    return choices


def accept_matches(tree: TokenTree, choices: Tensor) -> Accepted:
    """Accept the longest path of nodes that equal the target's choice [B, N] after their parent."""
    shape = tree.topology
    if shape.max_depth == 0:
        return Accepted(shape.parent_or_root, choices, shape.steps_to.squeeze(1))
    agrees = choices.gather(1, shape.parent_or_root) == tree.tokens  # [B, N]
    if tree.valid is not None:
        agrees = agrees & tree.valid
    # A node counts when its whole way from the root agrees; at most one node of a depth can. The
    # root always does, and of several maxima the first is taken.
    whole = agrees.take(shape.below_root).all(-1)  # [B, N]
    count, best = torch.where(whole, shape.steps_to, 1).max(-1)  # [B], [B]
    path = shape.path_to(best)  # [B, A]
    return Accepted(path, choices.gather(1, path), count)
