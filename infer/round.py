"""One round of decoding: grow a tree, verify it in one forward, accept a path, commit it.

The host reads nothing of the device in here, so a round can be captured as a CUDA graph and
replayed. It ends in one report, a tensor of whole numbers, which is all that the host reads of it:
`pack` makes it and `unpack` takes it apart.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.heads import DrafterGroup, Step, TokenTree
from headstart.heads.group import GroupMember, proposer

from .log_probabilities import LogProbabilities
from .masked_proposals import MaskedProposals
from .request import Request
from .rules.rule_api import Accepted
from .trees.policy import Committed, Policy


class Report(NamedTuple):
    """What the host reads of a round."""

    tokens: np.ndarray  # [B, A]
    nodes: np.ndarray  # [B] of the accepted path
    met: np.ndarray | None  # [B, A] after which tokens the stopping criteria held; None without any
    drafter: np.ndarray | None  # [B] whose part holds the path; None but of several drafters
    logprobs: LogProbabilities | None  # [B, A]; None where no request asks for them
    broken: np.ndarray | None  # [B] whose proposals were NaN or infinite; None: nobody looked


class ProposalCheck:
    """A group's proposals, passed on, with what shows a NaN or an infinity among them kept.

    They cannot change the text, only slow it down, so not every round is checked.

    A NaN counts as larger than any number, so the best scores by which children are chosen tell of
    one anywhere in their row, and no further pass over the vocabulary is needed.
    """

    def __init__(self, group: DrafterGroup):
        self._best: list[Tensor] = []  # [B, …] each, see `Step.note`
        self.members = [_CheckedMember(member, self._best) for member in group.members]

    def broken(self) -> Tensor | None:
        """[B] bool, whose proposals were NaN or infinite; None when there were no logits."""
        if not self._best:
            return None
        return (torch.cat(self._best, 1) * 0).sum(1).isnan()


class _CheckedMember:
    def __init__(self, member: GroupMember, best: list[Tensor]):
        self.member, self.config, self.independent = member, member.config, member.independent
        self._best = best

    def begin(self, states: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        return self._noted(self.member.begin(states, features, tokens, count))

    def extend(self, states: Any, tokens: Tensor, parent: Tensor) -> Step:
        return self._noted(self.member.extend(states, tokens, parent))

    def _noted(self, step: Step) -> Step:
        return step if step.logits is None else replace(step, best=self._best)


def run_round(
    request: Request, policy: Policy, longest: int, even: bool, check: ProposalCheck | None
) -> tuple[Committed, Tensor]:
    """Run one round for all rows; returns what the next one starts from, and the report.

    Args:
        policy: grows the tree, see `Request.next_policy`.
        longest: a bound on the roots' positions; even: whether all of them stand there.
    """
    drafter = proposer(within_forms(request, check or request.drafters))
    before, committed = [*request.unseen, request.committed], request.committed
    if policy.nodes == 1 and request.drafters.members:  # a plain round between others
        request.unseen = before
    else:
        request.unseen, committed = [], Committed.of_rounds(before)
    tree = policy.grow(drafter, request.states, committed, request.children)
    logits, features = request.target.verify(tree, request.lengths, longest, even)
    return accept_and_commit(request, tree, logits, features, check)


def within_forms(request: Request, group: DrafterGroup | ProposalCheck) -> Any:
    """What proposes for a request, without what the forms of its rows exclude, if it has any."""
    if group.members and (forms := request.sampling.forms) is not None:
        return MaskedProposals(group.members, forms, request.texts())
    return group


def accept_and_commit(
    request: Request,
    tree: TokenTree,
    logits: Tensor,
    features: Tensor,
    check: ProposalCheck | None = None,
) -> tuple[Committed, Tensor]:
    """The second half of a round: choose a path of a verified tree and keep it.

    Args:
        logits: [B, N, V] and features: [B, N, F], the target's at the tree's nodes.
    """
    record, lengths, text = request.record, request.lengths, request.text
    if request.drafters.observes:
        going = (request.committed.count > 0).unsqueeze(1)  # [B, 1]
        true = going.expand_as(tree.tokens) if tree.valid is None else tree.valid & going
        request.drafters.observe(request.states, tree.tokens, logits, true)
    scores = None if record is None else []
    accepted = request.rule.accept(request.verified(tree, logits, scores))
    request.target.commit(accepted.path, request.policy.in_place or tree.nodes == 1)
    if record is not None and scores:
        record.note(accepted.path, scores=scores[0], logits=logits)
    tokens, count = accepted.tokens, accepted.count  # [B, A], [B]
    report = pack(request, accepted, logits, check)
    if request.alive is not None:
        # Rows that have ended commit nothing, and tokens may not be checked yet.
        tokens, count = tokens.clamp(min=0), count * request.alive
    if text.seen is not None:
        text.seen.scatter_(1, tokens.clamp(min=0), True)
    if request.drafters.members:
        path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        features = features.gather(1, path)  # [B, A, F]
    return Committed(features, tokens, count, lengths + count), report


def pack(
    request: Request, accepted: Accepted, logits: Tensor, check: ProposalCheck | None
) -> Tensor:
    """A round's report, on the device, see `unpack`; text that is kept takes the tokens too.

    Args:
        logits: [B, N, V] of the tree's nodes.
    """
    tokens, steps = accepted.tokens, accepted.tokens.shape[1]
    parts = [tokens, accepted.count] if steps > 1 else [tokens]  # a tree's root is accepted
    if steps > 1 and len(request.policy.first_nodes) > 1:
        parts.append(accepted.path[:, 1])
    if request.keeps_text:
        # What is cut is overwritten, or padding at the end. Nobody is shown an id below 0.
        columns = request.lengths.unsqueeze(1) + request.offset[:, :steps]
        request.text.ids.scatter_(1, columns, tokens.clamp(min=0))
    if request.criteria:
        parts.append(_criteria_met(request, steps))
    if request.logprobs is not None:
        parts += LogProbabilities.pack(logits, accepted.path, tokens, request.logprobs)
    if check is not None and (broken := check.broken()) is not None:
        parts.append(broken)
    return torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else tokens


def unpack(request: Request, packed: np.ndarray, policy: Policy) -> Report:
    """A report as `pack` made it, of a round whose tree that policy grew."""
    batch, steps = len(request.rows.remaining), policy.max_depth + 1  # A
    size, nodes, met, drafter, logprobs = batch * steps, request.rows.one_node, None, None, None
    tokens, rest = packed[:size].reshape(batch, steps), packed[size:]
    if steps > 1:
        nodes, rest = rest[:batch], rest[batch:]
        if len(policy.first_nodes) > 1:
            first, rest = rest[:batch], rest[batch:]
            drafter = np.searchsorted(policy.first_nodes, first, side="right") - 1
    if request.criteria:
        met, rest = rest[:size].reshape(batch, steps) > 0, rest[size:]
    if request.logprobs is not None:
        logprobs, rest = LogProbabilities.unpack(rest, batch, steps, request.logprobs)
    return Report(tokens, nodes, met, drafter, logprobs, rest > 0 if rest.size else None)


def _criteria_met(request: Request, steps: int) -> Tensor:
    """Whether the stopping criteria hold after each token [B, A], asked as `generate` asks."""
    text, criteria = request.text, request.criteria
    met = torch.zeros(len(text.ids), steps, dtype=torch.bool, device=text.ids.device)
    for length in np.unique(text.host_lengths):
        mine = text.lengths == int(length)
        for step in range(steps):
            written = text.ids[:, : int(length) + step + 1]
            answer = criteria(written, None)  # type: ignore[misc,arg-type]
            met[:, step] |= answer.to(met.device) & mine
    return met
