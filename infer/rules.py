"""Who is accepted: rules turn the target's logits on a tree into a path and the next token.

`greedy`, `match` and `coupled` share one idea: the target chooses its token at every node by a
fixed function of that node's own prefix (the argmax, or the argmax after the noise of its
position), and the longest path of nodes that agree with those choices is accepted. The text is
therefore the one that plain decoding writes with the same choices, whatever the tree holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.heads import OptionError, Sampling, TokenTree
from headstart.heads.core import argmax

EXPANSION = {"greedy": "topk", "match": "topk", "coupled": "coupled"}
"""The children that each rule takes unless told otherwise."""

REFUSED = {
    ("coupled", "greedy"): "greedy decoding draws nothing, so its children have no noise to share",
    (
        "coupled",
        "match",
    ): "children that share the target's noise are what the rule 'coupled' names",
    ("topk", "coupled"): "children without the target's noise are what the rule 'match' names",
}
"""Pairs of expansion and rule that are refused, and why; all others of known names are legal."""


def check_pair(expansion: str, rule: str) -> None:
    """Refuse an illegal or unknown pair of expansion and rule.

    Raises:
        OptionError: with the reason.
    """
    if rule not in EXPANSION:
        raise OptionError(f"rule is {rule!r}; expected one of: {', '.join(EXPANSION)}.")
    known = sorted(set(EXPANSION.values()))
    if expansion not in known:
        raise OptionError(f"expansion is {expansion!r}; expected one of: {', '.join(known)}.")
    if reason := REFUSED.get((expansion, rule)):
        raise OptionError(
            f"expansion {expansion!r} with rule {rule!r}: {reason}; use {EXPANSION[rule]!r} "
            "children."
        )


class Text:
    """The rows' text so far, in the layout of `generate`: padded on the left, then growing.

    Args:
        ids: [B, C] int64 with room to grow, of which each row uses the same `width` columns so far.
        remaining: [B] tokens that each row may still emit; without a bound when None.
        ends: [V] bool, the tokens that end a row; none when None.

    Attributes:
        lengths: [B] int64, columns in use, padding included; always count the root.
    """

    def __init__(
        self,
        ids: Tensor,
        width: int,
        remaining: Tensor | None = None,
        ends: Tensor | None = None,
    ):
        self.ids, self.remaining, self.ends = ids, remaining, ends
        self.lengths = torch.full_like(ids[:, 0], width)
        self._host_lengths = np.full(len(ids), width)
        self._unread: list[np.ndarray] = []

    def hear(self, count: np.ndarray) -> None:
        """Note how many tokens [B] a round emitted."""
        self._unread.append(count)

    @property
    def host_lengths(self) -> np.ndarray:
        """[B] `lengths` on the host; added up only when somebody asks."""
        for count in self._unread:
            self._host_lengths = self._host_lengths + count
        self._unread.clear()
        return self._host_lengths

    def process(
        self, sampling: Sampling, extra: int, logits: Tensor, rows: np.ndarray | None = None
    ) -> Tensor:
        """Processed scores [B, V] after each row's first `length + extra` columns.

        A processor may hold something for every row of the batch, so it always sees the whole
        batch: once per distinct length, of which only the rows of that length are kept.

        Args:
            rows: [B] bool, the rows that matter, on the host; all of them when None.
        """
        scores = None
        for length in np.unique(self.host_lengths if rows is None else self.host_lengths[rows]):
            asked = None if rows is None else (rows & (self.host_lengths == length)).tolist()
            processed = sampling.process(self.ids[:, : int(length) + extra], logits, asked)
            mine = (self.lengths == int(length)).unsqueeze(1)
            scores = processed if scores is None else torch.where(mine, processed, scores)
        assert scores is not None
        return scores


@dataclass(slots=True)
class Accepted:
    """A round's outcome: path [B, A] of nodes from the root, emitted tokens [B, A], and count [B].

    Entry j < count of `tokens` is what the target chose after node `path[j]`; A = D + 1.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor


def target_choices(
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    lengths: Tensor,
    text: Text,
    scores: list[Tensor] | None = None,
) -> Tensor:
    """The token that the target chooses after each node, [B, N]; -1 where its logits are NaN.

    Args:
        logits: [B, N, V].
        lengths: [B], the root's position.
        text: needed only by processors that read the text; they run level by level along the path
            that the choices follow, and nodes off that path get -1.
        scores: takes the processed scores [B, N, V], which are true along the path, when a list.
    """
    if sampling.seeds is None and not sampling.processors:
        # Like generate, compare in float32; narrower types keep their order.
        if scores is not None:
            scores.append(logits.float())
        return argmax(logits.float() if logits.dtype == torch.float64 else logits)
    positions = lengths.unsqueeze(1) + tree.topology.depth + 1  # [B, N]
    if not sampling.rowwise:
        return _walk(tree, logits, sampling, positions, text, scores)
    processed = sampling.process_each(logits)
    if scores is not None:
        scores.append(processed)
    return sampling.choose(processed, positions)


def _walk(
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    positions: Tensor,
    text: Text,
    kept: list[Tensor] | None,
) -> Tensor:
    batch, nodes, vocab = logits.shape
    node = torch.zeros(batch, 1, dtype=torch.long, device=logits.device)  # [B, 1]
    alive = torch.ones_like(node, dtype=torch.bool)
    choices = torch.full((batch, nodes), -1, device=logits.device)
    if kept is not None:
        kept.append(logits.to(torch.float32, copy=True))
    rows = None
    for level in range(tree.topology.max_depth + 1):
        if sampling.particular:
            # What such a processor is shown must be what plain decoding would show it, no more:
            # rows that write a token here, and nothing once there is none.
            writes = alive.squeeze(1)
            if text.remaining is not None:
                writes = writes & (text.remaining > level)
            rows = writes.cpu().numpy()
            if not rows.any():
                break
        at = node.unsqueeze(-1).expand(-1, -1, vocab)  # [B, 1, V]
        scores = text.process(sampling, level, logits.gather(1, at).squeeze(1), rows).unsqueeze(1)
        token = sampling.choose(scores, positions.gather(1, node))  # [B, 1]
        choices.scatter_(1, node, torch.where(alive, token, choices.gather(1, node)))
        if kept is not None:
            here = torch.where(alive.unsqueeze(-1), scores, kept[-1].gather(1, at))
            kept[-1].scatter_(1, at, here)
        match = (tree.topology.parents == node) & (tree.tokens == token)
        if tree.valid is not None:
            match = match & tree.valid
        alive = alive & match.any(1, keepdim=True)
        token = token.clamp(min=0)
        if text.ends is not None:
            alive = alive & ~text.ends[token]
        # Overwritten by the commit.
        text.ids.scatter_(1, text.lengths.unsqueeze(1) + level, token)
        node = torch.where(alive, match.byte().argmax(1, keepdim=True), node)
    return choices


def accept_matches(tree: TokenTree, choices: Tensor) -> Accepted:
    """Accept the longest path of nodes that equal the target's choice after their parent.

    Args:
        choices: [B, N], see `target_choices`.
    """
    shape = tree.topology
    if shape.max_depth == 0:
        return Accepted(shape.parent_or_root, choices, shape.steps_to.squeeze(1))
    agrees = choices.gather(1, shape.parent_or_root) == tree.tokens  # [B, N]
    if tree.valid is not None:
        agrees = agrees & tree.valid
    agrees[:, 0] = True  # the root is committed already
    # A node counts when its whole way from the root agrees; at most one node of a depth can.
    batch, nodes, steps = shape.paths.shape
    whole = agrees.gather(1, shape.paths.reshape(batch, -1)).view(batch, nodes, steps).all(-1)
    best = (whole * shape.steps_to).argmax(-1, keepdim=True)  # [B, 1]
    path = shape.paths.gather(1, best.unsqueeze(-1).expand(-1, -1, steps)).squeeze(1)  # [B, A]
    return Accepted(path, choices.gather(1, path), shape.steps_to.gather(1, best).squeeze(1))
