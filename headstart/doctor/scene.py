"""What the doctor looks at, and what it says of a cause that it suspects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Manifest
from headstart.heads.artifacts.conditions import drafter_conditions, target_conditions

from .pairs import Pair

Undo = Callable[[Pair], Pair]


@dataclass(frozen=True)
class Difference:
    """What a cause found.

    Attributes:
        cause: its name.
        said: training and decoding side by side; empty where nothing is known to differ and the
            ways are mere trials.
        advice: what to do, once it was found to matter.
        ways: what it is undone by, each with a name; none where that takes a training.
    """

    cause: str
    said: str
    advice: str
    ways: dict[str, Undo] = field(default_factory=dict)


@dataclass
class Scene:
    """A pair as it decodes, and what is known of its training.

    Attributes:
        manifest: None for a drafter that others trained.
        original: loads the target that the manifest names; None where it is not to be had.
        longest: tokens of the longest text that was decoded, `new_tokens` of them new at most.
        chats: whether any prompt is a chat.
        first_round: τ of each answer's first round.
        written: [M] the tokens of the target's greedy answers.
        own_loss: the target's on text that it wrote itself at temperature 1, see `mean_loss`.
    """

    pair: Pair
    manifest: Manifest | None
    original: Callable[[], PreTrainedModel] | None = None
    longest: int = 0
    new_tokens: int = 64
    chats: bool = False
    own_loss: Mapping[str, float] | None = None
    first_round: float | None = None
    written: Tensor | None = None

    def trained(self, part: str) -> dict[str, Any]:
        """What the manifest notes of a part of training; empty where it does not."""
        return (self.manifest.trained.get(part) if self.manifest else None) or {}

    @cached_property
    def target(self) -> dict[str, Any]:
        return target_conditions(self.pair.target)

    @cached_property
    def drafter(self) -> dict[str, Any]:
        return drafter_conditions(self.pair.drafter)


Find = Callable[[Scene], list[Difference]]
