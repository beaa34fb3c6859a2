"""What drafters share that follow earlier text: matches, and what came after each of them.

Only nodes whose path is the beginning of a match's continuation have proposals. These are computed
before a tree is grown, for `AT_ONCE` levels at a time, and a level only looks them up. Of three
matches that go on as

    a b c …     a b d …     a e f …

the first one stands for the node `a b`, and its proposals are c and d.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..drafter import Drafter, Step, entries_at

AT_ONCE = 8
_NONE = -2  # how no match goes on, not even one whose text has ended


class MatchState:
    """M matches of a round, what stands for each node, and what is proposed in L levels.

    Another match, M, agrees with the root and with nothing else: it stands for the root, and below
    it for nodes that no match goes on to.
    """

    scratch: ClassVar[tuple[str, ...]] = (
        "level", "number", "stands", "shared", "children", "ids", "shares"
    )  # fmt: skip

    level: int  # depth of the nodes grown last
    number: Tensor  # [M + 1], each match's
    stands: Tensor  # [B, 1 + G] which match stands for the root and for each node grown so far
    shared: Tensor  # [B, M + 1 or 1, M + 1] which matches go on alike up to where L levels begin
    children: Tensor  # [B, L, M + 1, M + 1] for a match, the tokens that may come next, each in
    # the place of the match that will stand for it; -1 elsewhere
    ids: Tensor  # [B, L, M + 1, M + 1] the same, best first
    shares: Tensor | None  # of the votes that those have; None where the drafter knows none


class MatchDrafter(Drafter):
    """Proposes how the matches that agree with a node go on."""

    votes: ClassVar[bool] = False
    """Whether `scores` are votes, a node's share of which is its probability."""

    def after(self, state: Any, depth: Tensor) -> Tensor:
        """Each match's token after `depth` [L] tokens of its continuation, [B, L, M].

        A match whose text has ended goes on with `END`, which is not proposed.
        """
        raise NotImplementedError

    def scores(self, state: Any, shared: Tensor) -> Tensor:
        """What the tokens after L levels are ranked by: above 0, the best first.

        Args:
            shared: [B, L, M + 1, M + 1], which matches go on alike to this token; 1 or 0.

        Returns:
            [B, L, M + 1], alike for all matches that share it, or counted for the first alone.
        """
        raise NotImplementedError

    def at_root(self, state: Any, agrees: Tensor) -> Step:
        """The root's proposals, of the matches that there are: [B, M] bool."""
        batch, matches = agrees.shape
        state.level = 0
        state.number = torch.arange(matches + 1, device=agrees.device)
        state.stands = state.number[-1:].expand(batch, 1)
        state.shared = torch.nn.functional.pad(agrees, (0, 1)).unsqueeze(1)
        self._look_ahead(state)
        return self._proposals(state, state.stands)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        above = state.stands.gather(1, parent + 1)  # [B, W]; entry 0 is the root
        children = entries_at(state.children[:, state.level % AT_ONCE], above)  # [B, W, M + 1]
        same = children == tokens.unsqueeze(-1)
        stands = torch.where(same, state.number, state.number[-1]).amin(-1)
        state.stands = torch.cat([state.stands, stands], 1)
        state.level += 1
        if state.level % AT_ONCE == 0:
            self._look_ahead(state)
        return self._proposals(state, stands)

    def _proposals(self, state: Any, stands: Tensor) -> Step:
        level, log_probs = state.level % AT_ONCE, None
        if state.shares is not None:
            log_probs = entries_at(state.shares[:, level, :, :-1], stands).log()
        return Step(ids=entries_at(state.ids[:, level, :, :-1], stands), log_probs=log_probs)

    def _look_ahead(self, state: Any) -> None:
        """Compute what the matches propose in the next levels."""
        depth = torch.arange(state.level, state.level + AT_ONCE, device=state.number.device)
        tokens = torch.nn.functional.pad(self.after(state, depth), (0, 1), value=_NONE)
        same = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)  # [B, L, M + 1, M + 1]
        shared = same.cumprod(1) * state.shared.unsqueeze(1)  # this level's token, too
        before = state.shared.expand_as(shared[:, 0]).unsqueeze(1)
        before = torch.cat([before, shared[:, :-1]], 1)
        state.shared = shared[:, -1]
        first = ~shared.tril(-1).any(-1) & (tokens >= 0)  # of those with the same token
        scores = before * (self.scores(state, shared) * first).unsqueeze(-2)
        state.children = torch.where(scores > 0, tokens.unsqueeze(-2), -1)
        scores, best = scores.sort(dim=-1, descending=True, stable=True)
        state.ids = state.children.gather(-1, best)
        state.shares = scores / scores.sum(-1, keepdim=True) if self.votes else None


class VotingDrafter(MatchDrafter):
    """Proposes the tokens that matches vote for, with their shares of the votes.

    A state has the matches' weights, `weight` [B, M + 1] float32.
    """

    votes = True

    @property
    def dtype(self) -> torch.dtype:
        """That of its votes; transformers' own asks for weights."""
        return torch.float32

    @property
    def default_tree(self) -> str:
        return "best-first:16,4,8"

    def votes_at_root(self, state: Any, match: Tensor) -> Step:
        """The root's proposals. Each match counts twice as much for every further token of it.

        Args:
            match: tokens of each, [B, M], 0 or less where there is none; the longest count 1.
        """
        weight = torch.exp2((match - match.amax(1, keepdim=True)).float())
        state.weight = torch.nn.functional.pad(weight, (0, 1))
        return self.at_root(state, match > 0)

    def scores(self, state: Any, shared: Tensor) -> Tensor:
        return (shared * state.weight.unsqueeze(1).unsqueeze(1)).sum(-1)
