"""What a batch of prompts holds while it is decoded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import DrafterGroup, Sampling

from .record import Record
from .rows import Rows
from .rules.registry import Rule
from .rules.rule_api import Text
from .target import Target
from .trees.policies import Children, Committed, Policy, StaticTree

ROOT_ONLY = StaticTree([])

FIRST_TOKENS = 512
"""New tokens that cache and text first have space for; later they grow by half."""


class Capacity:
    """How many slots of cache a request has, and how many it may come to need.

    Args:
        prompt: tokens of the longest prompt.
        new_tokens: at most so many follow.
        behind: slots that rounds may write behind the position of a root.

    Attributes:
        longest: the largest root position that there is space for.
        most: slots, should all be needed.
    """

    def __init__(self, prompt: int, new_tokens: int, behind: int):
        self.behind, self.most = behind, prompt + new_tokens + behind
        self.longest = prompt + min(new_tokens, FIRST_TOKENS) - 1

    @property
    def slots(self) -> int:
        """Slots for roots up to position `longest`."""
        return min(self.longest + 1 + self.behind, self.most)

    def grow(self, longest: int) -> None:
        """Have space for half as many tokens again; twice as many would cost too much memory."""
        self.longest = longest + max(FIRST_TOKENS, longest // 2) - 1


@dataclass
class Request:
    """A batch of B rows, and how they are decoded.

    Attributes:
        reads_text: whether processors or criteria read the rows' text.
        rows: what the host knows of the rows; text, committed, states: what the device holds, the
            states being the drafters' own. All are there from the prefill on, as is what follows.
        offset: [B, A] the columns of the text that a round's tokens go to, counted from `lengths`.
        text_columns: columns of the text, beside the largest root position.
    """

    target: Target
    drafters: DrafterGroup
    policy: Policy
    sampling: Sampling
    children: Children
    rule: Rule
    criteria: StoppingCriteriaList | None
    record: Record | None
    pad: int
    reads_text: bool = field(init=False)
    rows: Rows = field(init=False)
    text: Text = field(init=False)
    committed: Committed = field(init=False)
    states: list[Any] = field(init=False)
    capacity: Capacity = field(init=False)
    offset: Tensor = field(init=False)
    text_columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.reads_text = bool(self.criteria or self.sampling.readers)

    @property
    def lengths(self) -> Tensor:
        """[B] cached tokens of each row, the position of its root."""
        return self.committed.lengths

    def make_space(self, longest: int) -> None:
        """Let cache and text have space for a round whose roots stand at `longest` at most."""
        if longest <= self.capacity.longest:
            return
        self.capacity.grow(longest)
        self.target.reserve(self.capacity.slots)
        if self.reads_text:
            missing = self.capacity.longest + self.text_columns - self.text.ids.shape[1]
            self.text.ids = torch.nn.functional.pad(self.text.ids, (0, missing), value=self.pad)

    def restore_ended_rows(self, count: np.ndarray) -> None:
        """Put rows that have ended back to where they ended, which the device could not know.

        Args:
            count: [B], how many tokens each of them hands to its drafter.
        """
        committed, device = self.committed, self.lengths.device
        alive = torch.from_numpy(self.rows.remaining > 0).to(device)  # [B]
        ended = {"count": count, "lengths": self.rows.positions, "root": self.rows.roots[:, None]}
        found = {"tokens": committed.tokens.clamp(min=0)}  # past an end token there may be none
        for name, values in ended.items():
            current: Tensor = getattr(committed, name)
            going = alive if current.dim() == 1 else alive.unsqueeze(1)
            found[name] = torch.where(going, current, torch.from_numpy(values).to(device))
        self.committed = replace(committed, **found)

    def drop_drafters(self) -> None:
        """Decode plainly from now on, since proposals were NaN or infinite."""
        names = " and ".join(type(each).__name__ for each in self.drafters.drafters)
        if not names:
            return
        warnings.warn(
            f"{names} proposed NaN or infinite logits; decoding goes on "
            "without it, more slowly: check its weights and dtype.",
            RuntimeWarning,
            stacklevel=2,
        )
        self.drafters, self.states, self.policy = DrafterGroup(), [], ROOT_ONLY
