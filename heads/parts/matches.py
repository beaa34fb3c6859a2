"""What drafters share that follow earlier text: matches, and what came after each of them."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..drafter import Drafter, Step, entries_at
from .contexts import END


class MatchState:
    """M matches of a round, and for the root and each of G nodes grown so far its depth, which
    matches continue with the path to it, and with which token each match would go on."""

    scratch: ClassVar[tuple[str, ...]] = ("agrees", "following", "depth")

    agrees: Tensor  # [B, 1 + G, M] bool
    following: Tensor  # [B, 1 + G, M]
    depth: Tensor  # [B, 1 + G]


class MatchDrafter(Drafter):
    """Proposes how the matches that agree with a node go on."""

    def after(self, state: Any, depth: Tensor) -> Tensor:
        """Each match's token after `depth` [B, W] tokens of its continuation, [B, W, M]."""
        raise NotImplementedError

    def proposals(self, state: Any, tokens: Tensor, agrees: Tensor) -> Step:
        """What W nodes propose, of the next tokens and which of them count, [B, W, M] both."""
        raise NotImplementedError

    def at_root(self, state: Any, agrees: Tensor) -> Step:
        """The root's proposals, of the matches that there are: [B, M] bool."""
        state.agrees = agrees.unsqueeze(1)
        state.depth = agrees.new_zeros(len(agrees), 1, dtype=torch.int64)
        state.following = self.after(state, state.depth)
        return self.proposals(state, state.following, state.agrees)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        at = parent + 1  # entry 0 is the root
        depth = state.depth.gather(1, at) + 1  # [B, W]
        goes_on = entries_at(state.following, at) == tokens.unsqueeze(-1)
        agrees = entries_at(state.agrees, at) & goes_on  # [B, W, M]
        following = self.after(state, depth)
        state.depth = torch.cat([state.depth, depth], 1)
        state.agrees = torch.cat([state.agrees, agrees], 1)
        state.following = torch.cat([state.following, following], 1)
        return self.proposals(state, following, agrees)


class VotingDrafter(MatchDrafter):
    """Proposes the tokens that matches vote for, with their shares of the votes.

    A state has the matches' weights, `weight` [B, M] float32. A match goes on with `END` where its
    text ends, and then votes no more.
    """

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
        state.weight = torch.exp2((match - match.amax(1, keepdim=True)).float())
        return self.at_root(state, match > 0)

    def proposals(self, state: Any, tokens: Tensor, agrees: Tensor) -> Step:
        agrees = agrees & (tokens != END)
        votes = state.weight.unsqueeze(1) * agrees  # [B, W, M]
        same = same_tokens(tokens)
        score = (same * votes.unsqueeze(-2)).sum(-1) * first_ones(same, agrees)
        score, best = score.sort(dim=-1, descending=True, stable=True)
        ids = tokens.gather(-1, best).masked_fill(score == 0, -1)
        return Step(ids=ids, log_probs=(score / votes.sum(-1, keepdim=True)).log())


def first_ones(same: Tensor, agrees: Tensor) -> Tensor:
    """Which matches agree, and no earlier one of the same token does: [B, W, M, M], [B, W, M]."""
    return agrees & ~(same & agrees.unsqueeze(-2)).tril(-1).any(-1)


def same_tokens(tokens: Tensor) -> Tensor:
    """Which matches go on with the same token, [B, W, M] -> [B, W, M, M]."""
    return tokens.unsqueeze(-1) == tokens.unsqueeze(-2)
