"""One round of decoding: grow a tree, verify it in one forward, accept a path, commit it.

The host reads nothing of the device in here, so a round can be captured as a CUDA graph and
replayed. It ends in one report, see `report`, which is all that the host reads of it.
"""

from __future__ import annotations

from torch import Tensor

from headstart.heads import TokenTree
from headstart.heads.group import proposer

from .report import ProposalCheck, pack
from .request import Request
from .rules.rule_api import Verified
from .trees.policy import Committed


def run_round(
    request: Request, longest: int, even: bool, check: ProposalCheck | None
) -> tuple[Committed, Tensor]:
    """Run one round for all rows of a request.

    Args:
        longest: a bound on the roots' positions; even: whether all of them stand there.
        check: looks at the drafters' proposals, when given.

    Returns:
        What the next round starts from, and the report.
    """
    drafter = proposer(check or request.drafters)
    tree = request.policy.grow(drafter, request.states, request.committed, request.children)
    logits, features = request.target.verify(tree, request.lengths, longest, even)
    return accept_and_commit(request, tree, logits, features, check)


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
    scores = None if record is None else []
    accepted = request.rule.accept(Verified(tree, logits, request.sampling, lengths, text, scores))
    if not request.policy.in_place and tree.nodes > 1:
        request.target.commit(accepted.path)
    if record is not None and scores:
        record.note(accepted.path, scores=scores[0], logits=logits)
    tokens, count = accepted.tokens, accepted.count  # [B, A], [B]
    report = pack(request, tokens, count, check)
    if text.seen is not None:
        text.seen.scatter_(1, tokens.clamp(min=0), True)
    # Past a path's end its last token stands again.
    root = tokens[:, -1:] if tokens.shape[1] > 1 else tokens  # [B, 1]
    if request.drafters.members:
        path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        features = features.gather(1, path)  # [B, A, F]
    return Committed(features, tokens, count, root, lengths + count), report
