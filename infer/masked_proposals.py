"""Proposals within the forms of the rows: what a form excludes is not proposed.

The target may not write such a token, so a node for it would be verified for nothing. This changes
what is drafted, never the text: rules are exact for any proposals, and are told those that children
were chosen from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads import Step
from headstart.heads.core.forms import FormsByRow

from .trees.children import rows_of


class MaskedProposals:
    """The proposals of a group's members, without the tokens that a node's text may not go on with.

    What a node's text may go on with differs from node to node, so also members that answer for all
    depths at once answer level by level here. The host reads each level's tokens.

    Args:
        members: of a `DrafterGroup`, or what stands for them.
        texts: [B] the rows' texts so far, the roots included, [T] int64 each.
    """

    def __init__(self, members: Sequence[Any], forms: FormsByRow, texts: Sequence[np.ndarray]):
        self.members = [_MaskedMember(member, forms, texts) for member in members]


class _MaskedMember:
    independent = False

    def __init__(self, member: Any, forms: FormsByRow, texts: Sequence[np.ndarray]):
        self.member, self.config = member, member.config
        self._forms, self._roots = forms, texts
        self._grown: list[list[np.ndarray]] = [[] for _ in texts]  # the texts up to each node
        self._depth, self._ahead = 1, Step()  # of independent members: all that was proposed

    def begin(self, states: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        step = self.member.begin(states, features, tokens, count)
        if self.member.independent:
            self._ahead, step = step, rows_of(step, 0, 1)
        return self._within(step, [[text] for text in self._roots])

    def extend(self, states: Any, tokens: Tensor, parent: Tensor) -> Step:
        if self.member.independent:
            step = _often(rows_of(self._ahead, self._depth, self._depth + 1), tokens.shape[1])
            self._depth += 1
        else:
            step = self.member.extend(states, tokens, parent)
        texts = []
        for root, grown, new, above in zip(
            self._roots, self._grown, tokens.tolist(), parent.tolist(), strict=True
        ):
            before = [root if node < 0 else grown[node] for node in above]
            texts.append([*map(np.append, before, new)])
            grown += texts[-1]
        return self._within(step, texts)

    def _within(self, step: Step, texts: list[list[np.ndarray]]) -> Step:
        """Proposals of W nodes, as far as the texts [B][W] up to them may go on so."""
        known: Any = step.ids if step.logits is None else step.logits
        rows = [row for row, nodes in enumerate(texts) for _ in nodes]
        every = [text for nodes in texts for text in nodes]
        columns = max(self.config.vocab_size, 0 if step.logits is None else known.shape[-1])
        allowed, _ = self._forms.allowed(rows, every, columns, known.device)
        allowed = allowed.unflatten(0, (len(texts), -1))  # [B, W, V]
        if step.logits is not None:
            return replace(step, logits=_allowed_logits(step, allowed))
        step = _allowed_candidates(step, allowed)
        return self._with_forced(step, rows, every)

    def _with_forced(self, step: Step, rows: list[int], every: list[np.ndarray]) -> Step:
        """Candidates, to which nodes without any get the token that must follow, if one must."""
        ids: Any = step.ids  # [B, W, k]
        none = (ids[..., 0] < 0).flatten().tolist()
        found = [
            form.forced(text) if lacks and (form := self._forms.forms[row]) is not None else -1
            for row, text, lacks in zip(rows, every, none, strict=True)
        ]
        if not any(token >= 0 for token in found):
            return step
        forced = torch.tensor(found, device=ids.device).view(ids.shape[:2])
        there = forced.unsqueeze(-1) >= 0
        ids = torch.where(there, pad(forced.unsqueeze(-1), (0, ids.shape[-1] - 1), value=-1), ids)
        log_probs = step.log_probs
        if log_probs is not None:
            log_probs = torch.where(there, torch.where(ids < 0, -torch.inf, 0.0), log_probs)
        return replace(step, ids=ids, log_probs=log_probs)


def _often(step: Step, count: int) -> Step:
    """The one row of proposals, for each of `count` nodes."""

    def spread(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.expand(-1, count, -1)

    return replace(
        step, logits=spread(step.logits), ids=spread(step.ids), log_probs=spread(step.log_probs)
    )


def _allowed_logits(step: Step, allowed: Tensor) -> Tensor:
    """Logits [B, W, Vd], -inf for what is not allowed; as they are for nodes where that is all."""
    logits: Any = step.logits
    if step.vocabulary is None:
        allowed = allowed[..., : logits.shape[-1]]
    else:
        allowed = allowed.index_select(-1, step.vocabulary)
    kept = logits.masked_fill(~allowed, -torch.inf)
    none = kept.amax(-1, keepdim=True) == -torch.inf
    return torch.where(none, logits, kept)


def _allowed_candidates(step: Step, allowed: Tensor) -> Step:
    """Those of the candidates that are allowed, in their order."""
    ids: Any = step.ids  # [B, W, k]
    good = (ids >= 0) & allowed.gather(-1, ids.clamp(min=0))
    order = (~good).byte().sort(dim=-1, stable=True).indices
    ids = ids.masked_fill(~good, -1).gather(-1, order)
    log_probs = step.log_probs
    if log_probs is not None:
        log_probs = log_probs.masked_fill(~good, -torch.inf).gather(-1, order)
    return replace(step, ids=ids, log_probs=log_probs)
