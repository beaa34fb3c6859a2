"""What every policy of growing a token tree has, and what each round gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

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

    def then(self, one: Committed) -> Committed:
        """Both, for drafters that have seen neither; the second has a token for each row, or none.

        >>> features, numbers = torch.ones(1, 2, 4), torch.tensor([[1], [7]])
        >>> first = Committed(features, torch.tensor([[5, 5]]), *numbers)
        >>> both = first.then(Committed(features[:, :1], torch.tensor([[6]]), *numbers))
        >>> both.tokens.tolist(), both.count.tolist()
        ([[5, 6, 6]], [2])
        """
        columns = torch.arange(self.tokens.shape[1] + 1, device=self.tokens.device)
        first = columns < self.count.unsqueeze(1)  # [B, A + 1]
        tokens = torch.where(first, pad(self.tokens, (0, 1)), one.tokens)
        features = pad(self.features, (0, 0, 0, 1))
        features = torch.where(first.unsqueeze(-1), features, one.features)
        return Committed(features, tokens, self.count + one.count, one.lengths)


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
