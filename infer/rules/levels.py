"""What `traversal` needs of all nodes, a launch for each level of the tree.

The children of one node are judged one after another, and a node before its children; but nodes of
one depth are independent of each other. So all of a level are judged at once here, each as a row of
a batch. On CUDA that is one launch, see `level_kernels`, and the scores of all nodes are processed
together, for as long as they are not too much memory. Elsewhere `traversal` goes from node to node
and holds one row of the vocabulary for each row of the batch.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import TokenTree, Topology
from headstart.heads.core.fused_products import has_kernels

from .rule_api import Verified
from .siblings import State, attempt

AT_ONCE = 1 << 24
"""Scores of all nodes, at most, that a GPU holds at once: 64 MB in float32, a few times."""
_MOST_TURNS = 62


def at_once(verified: Verified) -> bool:
    """Whether the nodes of a level are judged in one launch."""
    turns, logits = verified.tree.turns, verified.logits
    fits = logits.numel() <= AT_ONCE and max(turns, default=0) <= _MOST_TURNS
    return has_kernels(logits) and verified.sampling.rowwise and fits


def judge_all(verified: Verified) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each node's weight before its children and after them, [B, N], and what they left it.

    That is `left` [2, B, N, V], not normalised, of which `side` [B, N] tells the half to read.
    """
    tree, shape = verified.tree, verified.tree.topology
    scores = verified.sampling.process_each(verified.logits)
    if verified.kept is not None:
        verified.kept[:] = [scores]
    left = torch.empty(2, *scores.shape, dtype=scores.dtype, device=scores.device)
    torch.softmax(scores, -1, out=left[0])
    before = torch.ones(tree.tokens.shape, dtype=scores.dtype, device=scores.device)
    after, side = before.clone(), torch.zeros_like(tree.tokens)
    source = _proposals(verified)
    rest = None if source is None else torch.empty_like(left[0])
    turns = sum(1 << turn for turn in tree.turns)
    entries = (tree.tokens, shape.parents, shape.rank, shape.depth, tree.proposal_row)
    entries = [entry.contiguous() for entry in entries]  # static ones are expanded
    for level in range(shape.max_depth):
        judge_level(
            left, side, before, after, rest, source, *entries, tree.valid, level, turns,
            tree.replacement, shape.widths[level],
        )  # fmt: skip
    return before, after, left, side


def _proposals(verified: Verified) -> Tensor | None:
    """All that children were drawn from, [B, G, V]; None for point masses alone."""
    tree = verified.tree
    if tree.logits is None:
        return None
    q = verified.sampling.warp(tree.logits).softmax(-1).nan_to_num_(0)  # [B, G, Vd]
    width = verified.logits.shape[-1]
    if tree.vocabulary is not None:
        return q.new_zeros(*q.shape[:2], width).index_copy_(2, tree.vocabulary, q)
    return pad(q, (0, width - q.shape[-1])) if q.shape[-1] < width else q


@torch.library.custom_op(
    "headstart::judge_level", mutates_args=("left", "side", "before", "after", "rest")
)
def judge_level(
    left: Tensor,
    side: Tensor,
    before: Tensor,
    after: Tensor,
    rest: Tensor | None,
    source: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    rank: Tensor,
    depth: Tensor,
    proposal_row: Tensor,
    valid: Tensor | None,
    level: int,
    turns: int,
    replacement: bool,
    width: int,
) -> None:
    """Judge the children of all nodes of a level.

    Args:
        left: [2, B, N, V], the target's distributions in its first half; changed.
        side: [B, N], zeros; 1 for nodes whose second half of `left` is what their children left.
        before, after: [B, N] weights, see `traversal`; those of the level are known, those of its
            children are written.
        rest: [B, N, V], overwritten where `source` [B, G, V], the proposals, is given.
        tokens, parents, rank, depth, proposal_row, valid: see `TokenTree`, `Topology`.
        turns: a bit for each of `TokenTree.turns`.
        replacement: see `TokenTree`.
        width: the most children that a node has, or a bound on it.
    """
    if left.is_cuda:
        from .level_kernels import judge_level as launch

        launch(
            left, side, before, after, rest, source, tokens, parents, rank, depth, proposal_row,
            valid, level, turns, replacement,
        )  # fmt: skip
        return
    batch, nodes, vocab = left.shape[1:]
    node = torch.arange(nodes, device=left.device)
    whose = proposal_row.unsqueeze(1).masked_fill(parents.unsqueeze(1) != node.view(-1, 1), -1)
    q = None if source is None else _rows(source, whose.amax(2))
    state = State(left[0].reshape(-1, vocab), q, before.flatten())
    tree = _each_node_a_row(tokens, parents, rank, proposal_row, valid, replacement)
    mine, here = (depth == level).flatten(), node.repeat(batch).view(-1, 1)
    for order in range(width):
        born = (tree.topology.parents == here) & (tree.topology.rank == order)
        child, born = born.byte().argmax(1, keepdim=True), born.any(1) & mine
        there = born if tree.valid is None else born & tree.valid.gather(1, child).squeeze(1)
        if turns >> order & 1 and level == 0 and state.q is not None:
            row = proposal_row.gather(1, child.view(batch, nodes))
            state.q = torch.where(here == 0, _rows(_given(source), row), state.q)
        chance, state = attempt(tree, state, child, there)
        # Nodes that have no such child write beside the others.
        place = child.masked_fill(~born.unsqueeze(1), nodes).view(batch, nodes)
        for weights in (before, after):
            wide = pad(weights, (0, 1)).scatter_(1, place, chance.view(batch, nodes))
            weights.copy_(wide[:, :nodes])
    after.copy_(torch.where(mine.view(batch, nodes), state.weight.view(batch, nodes), after))
    left[0].copy_(state.p.view(batch, nodes, vocab))


def _given(source: Tensor | None) -> Tensor:
    assert source is not None, "a later drafter's children without proposals"
    return source


def _rows(source: Tensor, row: Tensor) -> Tensor:
    """Proposals [B * N, V] of `row` [B, N]; of none, those of any."""
    at = row.clamp(min=0).unsqueeze(-1).expand(-1, -1, source.shape[-1])
    return source.gather(1, at).flatten(0, 1)


def _each_node_a_row(
    tokens: Tensor,
    parents: Tensor,
    rank: Tensor,
    proposal_row: Tensor,
    valid: Tensor | None,
    replacement: bool,
) -> TokenTree:
    """Trees as often as they have nodes, [B * N, N]: the row of each node judges its children."""
    nodes = tokens.shape[1]

    def often(entries: Tensor) -> Tensor:
        return entries.repeat_interleave(nodes, 0)

    shape = Topology.from_parents(often(parents), 1)
    shape = replace(shape, rank=often(rank))
    given = None if valid is None else often(valid)
    return TokenTree(often(tokens), shape, given, often(proposal_row), replacement=replacement)
