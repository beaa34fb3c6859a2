"""The drafters of one target, each of which grows its own part of one token tree.

After SpecInfer's collections of small models (Miao et al. 2024, arXiv 2305.09781); the tree that
several fill is `headstart.infer.Union`. The target captures the layers that any of them reads, and
each drafter is given its own columns:

    drafters   a reads layers (FINAL,)      b reads (1, FINAL)      lookup reads none
    target     captures (FINAL, 1)          features [B, A, 2 D]
    given      a: columns 0 … D             b: D … 2 D, 0 … D       lookup: none
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .core import FusedLayers, OptionError, has_kernels_for
from .drafter import Drafter, Step


def fused_layers(drafter: Drafter) -> AbstractContextManager[Any]:
    """A context in which a drafter on a GPU decodes with fused layers; it may be entered again."""
    # Each kernel is tried by itself; were one to be off all the same, only drafts would be.
    return FusedLayers(drafter) if has_kernels_for(drafter) else nullcontext()


class GroupMember:
    """One drafter of a group, called with the states and features of all.

    It is the one of that `number`; its feature layers stand at `layers` of the `captured` many. It
    decodes in the context `fused`.
    """

    def __init__(
        self,
        drafter: Drafter,
        number: int,
        layers: Sequence[int],
        captured: int,
        fused: AbstractContextManager[Any] | None = None,
    ):
        self.drafter, self.number, self.config = drafter, number, drafter.config
        self.independent, self.max_depth = drafter.independent, drafter.max_depth
        self._layers, self._captured = list(layers), captured
        self._first = min(layers, default=0)
        self._in_order = self._layers == [self._first + i for i in range(len(layers))]
        self._fused = fused or nullcontext()

    def begin(self, states: list[Any], features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        with self._fused:
            return self.drafter.begin(states[self.number], self.own(features), tokens, count)

    def extend(self, states: list[Any], tokens: Tensor, parent: Tensor) -> Step:
        with self._fused:
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


class DrafterGroup:
    """All drafters that decode together: none for plain decoding, one, or several.

    A group keeps nothing of its own and is not saved: each drafter has an artifact of its own. Its
    methods call those of every drafter.

    Args:
        drafters: the first one's children are tried first.

    Attributes:
        members: the drafters as a tree's policy calls them.
        feature_layers: the layers that any of them reads, as the target has to capture them.

    Raises:
        OptionError: something else than drafters.
    """

    def __init__(self, drafters: Sequence[Drafter] = ()):
        for each in drafters:
            if not isinstance(each, Drafter):
                raise OptionError(
                    f"found a {type(each).__name__} among the drafters; expected a drafter, or a "
                    "flat list of them."
                )
        self.drafters = tuple(drafters)
        layers = tuple(dict.fromkeys(i for each in drafters for i in each.config.feature_layers))
        self.feature_layers, self.members = layers, list[GroupMember]()
        for number, each in enumerate(drafters):
            own = [layers.index(i) for i in each.config.feature_layers]
            member = GroupMember(each, number, own, len(layers), fused_layers(each))
            self.members.append(member)

    @classmethod
    def of(cls, drafters: "Drafter | DrafterGroup | Sequence[Drafter] | None") -> "DrafterGroup":
        """The group of no drafter, one, or several; a group is returned as it is."""
        if isinstance(drafters, DrafterGroup):
            return drafters
        found: Any = drafters
        if isinstance(drafters, nn.Module):  # one that is no drafter is refused by name
            found = [drafters]
        return cls(found or ())

    @property
    def observes(self) -> bool:
        return any(each.observes for each in self.drafters)

    @property
    def remembers(self) -> bool:
        return any(each.remembers for each in self.drafters)

    @property
    def needs_length_bound(self) -> bool:
        return any(each.needs_length_bound for each in self.drafters)

    def bind(self, target: PreTrainedModel) -> None:
        for each in self.drafters:
            each.bind(target)

    def start(self, batch: int, capacity: int) -> list[Any]:
        return [each.start(batch, capacity) for each in self.drafters]

    def reserve(self, states: list[Any], longest: int, room: int) -> None:
        for each, state in zip(self.drafters, states, strict=True):
            each.reserve(state, longest, room)

    def prefill(self, states: list[Any], features: Tensor, tokens: Tensor, count: Tensor) -> None:
        for member, state in zip(self.members, states, strict=True):
            member.drafter.prefill(state, member.own(features), tokens, count)

    def observe(self, states: list[Any], tokens: Tensor, logits: Tensor, true: Tensor) -> None:
        for each, state in zip(self.drafters, states, strict=True):
            if each.observes:
                each.observe(state, tokens, logits, true)

    def remember(self, tokens: Tensor, prompt: int) -> None:
        for each in self.drafters:
            if each.remembers:
                each.remember(tokens, prompt)


def members(drafter: Any) -> list[Any]:
    """The drafters that each grow a part of the tree: a group's members, one drafter, or none."""
    return [] if drafter is None else getattr(drafter, "members", [drafter])


def proposer(group: Any) -> Any:
    """What a tree's policy calls: the group itself, its only member, or None without one."""
    return group if len(group.members) > 1 else next(iter(group.members), None)
