"""What drafters share that follow earlier text: matches, and what came after each of them."""

from typing import Any

import torch
from torch import Tensor

from ..drafter import Drafter, Step, entries_at


class MatchState:
    """M matches of a round, and for the root and each of G nodes grown so far its depth and which
    matches continue with the path to it."""

    agrees: Tensor  # [B, 1 + G, M] bool
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
        return self.proposals(state, self.after(state, state.depth), state.agrees)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        at = parent + 1  # entry 0 is the root
        depth = state.depth.gather(1, at)  # [B, W]
        agrees = entries_at(state.agrees, at)
        agrees = agrees & (self.after(state, depth) == tokens.unsqueeze(-1))  # [B, W, M]
        state.depth = torch.cat([state.depth, depth + 1], 1)
        state.agrees = torch.cat([state.agrees, agrees], 1)
        return self.proposals(state, self.after(state, depth + 1), agrees)


def repeated(tokens: Tensor, agrees: Tensor) -> Tensor:
    """Whether an earlier match that agrees has the same token: [B, W, M] -> [B, W, M]."""
    same = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)
    return (same & agrees.unsqueeze(-2)).tril(-1).any(-1)
