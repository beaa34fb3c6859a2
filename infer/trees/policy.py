"""What every policy of growing a token tree has, and what each round gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headstart.heads import Drafter, OptionError, TokenTree
from headstart.heads.group import members

from .children import Children
from .expansions import Expansion
from .shapes import check_grown_by


@dataclass(slots=True)
class Committed:
    """What the last round (or the prefill) committed, as `Drafter.begin` takes it."""

    features: Tensor  # [B, A, F]
    tokens: Tensor  # [B, A], of which the last committed one stands again after the others
    count: Tensor  # [B]
    lengths: Tensor  # [B], cached tokens of each row; the root's position

    @property
    def root(self) -> Tensor:
        """[B, 1], the last committed token."""
        return self.tokens[:, -1:]

    @classmethod
    def of_rounds(cls, rounds: Sequence[Committed]) -> Committed:
        """What several rounds committed, one after another, all but the first a token a row.

        >>> features, numbers = torch.ones(1, 2, 4), torch.tensor([[1], [7]])
        >>> first = Committed(features, torch.tensor([[5, 5]]), *numbers)
        >>> both = [first, Committed(features[:, :1], torch.tensor([[6]]), *numbers)]
        >>> found = Committed.of_rounds(both)
        >>> found.tokens.tolist(), found.count.tolist()
        ([[5, 6, 6]], [2])
        """
        if len(rounds) == 1:
            return rounds[0]
        first, last = rounds[0], rounds[-1]
        tokens = torch.cat([each.tokens for each in rounds], 1)  # [B, A]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        skipped = first.tokens.shape[1] - first.count.unsqueeze(1)  # [B, 1]
        columns = torch.where(columns < first.count.unsqueeze(1), columns, columns + skipped)
        columns = columns.clamp(max=tokens.shape[1] - 1)  # [B, A]
        features = torch.cat([each.features for each in rounds], 1)
        wide = columns.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        count = torch.stack([each.count for each in rounds]).sum(0)
        return cls(features.gather(1, wide), tokens.gather(1, columns), count, last.lengths)


class Policy(ABC):
    """Grows one tree a round. `str(policy)` is a text that `parse_tree` reads back.

    Attributes:
        nodes: N, the root counted; the same in every round.
        max_depth: D, the deepest level.
        first_nodes: the number of the first node of each drafter's part; one part here.
        in_place: whether every accepted path already lies in the slots that it is committed to, as
            in a chain.
    """

    nodes: int
    max_depth: int
    in_place: bool = False
    first_nodes: tuple[int, ...] = (1,)

    @property
    def label(self) -> str:
        """A short name for reports and messages, which need not be read back."""
        return str(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, nodes={self.nodes})"

    def check(self, drafter: Drafter | None, expansion: Expansion = "topk") -> None:
        """Refuse a tree that the drafter cannot fill, or that would bias children so chosen."""
        check_grown_by(self, [member.max_depth for member in members(drafter)])
        if reason := self.bias(expansion):
            raise OptionError(reason)

    @abstractmethod
    def cut(self, depth: int) -> Self:
        """The same kind of tree, whose deepest level is `depth`, from 1 to its own."""

    def bias(self, expansion: Expansion) -> str:
        """Why the tree would bias children so chosen, and what to do; empty where it does not."""
        return ""

    @abstractmethod
    def grow(
        self, drafter: Drafter | None, state: Any, committed: Committed, children: Children
    ) -> TokenTree:
        """Propose a tree under `committed.root`."""
