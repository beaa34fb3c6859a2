"""Several drafters of one target, each of which grows its own part of one token tree.

After SpecInfer's collections of small models (Miao et al. 2024, arXiv 2305.09781); the tree that
they fill is `headstart.infer.Union`. The target hands out one run of features, the layers that any
of them reads; each is shown its own:

    drafters   a reads layers (FINAL,)      b reads (1, FINAL)      lookup reads none
    target     captures (FINAL, 1)          features [B, A, 2 D]
    shown      a: columns 0 … D             b: D … 2 D, 0 … D       lookup: none

"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .core import OptionError
from .drafter import Drafter, DrafterConfig, Step


class GroupMember:
    """One of several drafters, asked with what belongs to all of them.

    Args:
        drafter: the one; number: its place among them.
        layers: places of its feature layers among those that are captured.
        captured: how many those are.
    """

    def __init__(self, drafter: Drafter, number: int, layers: Sequence[int], captured: int):
        self.drafter, self.number, self.config = drafter, number, drafter.config
        self.independent, self.max_depth = drafter.independent, drafter.max_depth
        self._layers, self._captured = list(layers), captured
        self._first = min(layers, default=0)
        self._in_order = self._layers == [self._first + i for i in range(len(layers))]

    def begin(self, states: list[Any], features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        """`Drafter.begin`, given the states and features of all."""
        return self.drafter.begin(states[self.number], self.own(features), tokens, count)

    def extend(self, states: list[Any], tokens: Tensor, parent: Tensor) -> Step:
        """`Drafter.extend`, given the states of all."""
        return self.drafter.extend(states[self.number], tokens, parent)

    def own(self, features: Tensor) -> Tensor:
        """Its own of the features [B, A, F]: a view where its layers stand side by side."""
        layers = self._layers
        if len(layers) == self._captured and self._in_order:
            return features
        width = features.shape[-1] // max(self._captured, 1)  # D
        if self._in_order:
            return features.narrow(-1, self._first * width, len(layers) * width)
        return torch.cat([features.narrow(-1, layer * width, width) for layer in layers], -1)


class DrafterGroup(Drafter):
    """Drafters of one target, asked one by one through `members`.

    It is not saved: each of its drafters has an artifact of its own.

    Args:
        drafters: at least two; the first one's children are tried first.

    Raises:
        OptionError: fewer, or one that is several itself.
    """

    def __init__(self, drafters: Sequence[Drafter]):
        if len(drafters) < 2 or any(isinstance(each, DrafterGroup) for each in drafters):
            raise OptionError(
                f"found {len(drafters)} drafters for one tree, or several inside of several; "
                "expected two or more, side by side."
            )
        layers = list(dict.fromkeys(i for each in drafters for i in each.config.feature_layers))
        first = drafters[0].config
        shapes = {"hidden_size": first.hidden_size, "vocab_size": first.vocab_size}
        super().__init__(DrafterConfig(feature_layers=layers, **shapes))
        self.drafters = nn.ModuleList(drafters)
        self.members = [
            GroupMember(
                each, number, [layers.index(i) for i in each.config.feature_layers], len(layers)
            )
            for number, each in enumerate(drafters)
        ]

    @property
    def needs_length_bound(self) -> bool:  # type: ignore[override]
        return any(member.drafter.needs_length_bound for member in self.members)

    def bind(self, target: PreTrainedModel) -> Self:
        for member in self.members:
            member.drafter.bind(target)
        return super().bind(target)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return []  # each has borrowed for itself

    def start(self, batch: int, capacity: int) -> list[Any]:
        return [member.drafter.start(batch, capacity) for member in self.members]

    def reserve(self, state: list[Any], longest: int, room: int) -> None:
        for member, own in zip(self.members, state, strict=True):
            member.drafter.reserve(own, longest, room)

    def prefill(self, state: list[Any], features: Tensor, tokens: Tensor, count: Tensor) -> None:
        for member, own in zip(self.members, state, strict=True):
            member.drafter.prefill(own, member.own(features), tokens, count)

    def begin(self, state: list[Any], features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        """Refused: each answers for itself.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"found {len(self.members)} drafters where one was expected, for one list of "
            "proposals; give one, or a tree with a part for each, such as chain:4+chain:4."
        )


def members(drafter: Any) -> list[Any]:
    """The drafters that each grow a part of the tree: of several each, else the one; none of None.

    What several have is also had by whoever stands in for them, such as those who watch proposals.
    """
    return [] if drafter is None else getattr(drafter, "members", [drafter])
