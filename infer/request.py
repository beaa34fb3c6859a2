"""A batch of prompts: how it is decoded, and what it holds meanwhile."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import StoppingCriteriaList

from headstart.heads import DrafterGroup, Sampling, SlabCache, TokenTree
from headstart.heads.core import free_bytes, in_steps
from headstart.heads.core.forms import texts_of
from headstart.heads.core.sent import sent

from .depth import DepthChoice, RoundTimes
from .rows import Rows
from .rules.registry import GREEDY, Rule
from .rules.rule_api import Text, Verified, seen_in
from .stats import Record
from .target import Target
from .trees.children import Children
from .trees.expansions import Expansion
from .trees.policy import Committed, Policy
from .trees.static import StaticTree

ROOT_ONLY = StaticTree([])

FIRST_TOKENS = 512  # that cache and text first have space for; later they grow by half


class Capacity:
    """How many slots of cache a request has, and the `most` that it may come to need.

    Args:
        prompt: tokens of the longest prompt; new_tokens: at most so many follow.
        behind: slots that rounds may write behind the position of a root.
        first: tokens that there is space for at first.
    """

    def __init__(self, prompt: int, new_tokens: int, behind: int, first: int | None = None):
        self.behind, self.most = behind, prompt + new_tokens + behind
        # The largest root position that there is space for.
        self.longest = prompt + min(new_tokens, first or FIRST_TOKENS) - 1

    @property
    def slots(self) -> int:
        """Slots for roots up to position `longest`."""
        return min(self.longest + 1 + self.behind, self.most)


def first_tokens(cache: SlabCache, batch: int, prompt: int, new_tokens: int) -> int:
    """How many tokens a captured request first has space for.

    All of them where they take at most half of the memory that is free: a cache that grows is
    copied, and its rounds are captured anew.
    """
    needed, free = cache.bytes_of(batch, prompt + new_tokens), free_bytes(cache.shapes[0].device)
    return new_tokens if free is not None and 2 * needed <= free else FIRST_TOKENS


@dataclass
class Request:
    """A batch of B prompts.

    Attributes:
        target: the runner of the target model; drafters: bound to the same model, none where the
            tree is a root alone.
        policy: grows the tree; a root-only tree is plain decoding.
        times: of the rounds of an adaptive tree; depth: chooses each round's, where it is adaptive.
        expansion: how the drafters' children are chosen, see `Children`.
        eos: token ids that end a row; pad: the one that is written after a row's end.
        criteria: further stopping criteria, called after every token as `generate` calls them.
        rows: what the host knows of each row. This and the following are there from the prefill on.
        text, committed, states: what the device holds; the states are the drafters' own.
        device: that the target runs on.
        logprobs: how many of the most likely tokens are told at each place, with log-probabilities;
            None where no request asks for any.
        offset: [B, A], from a root's position to the text's columns of the tokens after it.
        unseen: what was committed before plain rounds, which drafters are yet to see.
        alive: [B] int64, 1 for rows that go on and 0 for those that have ended, where rounds start
            before the last one's tokens are checked; else None.
    """

    target: Target
    drafters: DrafterGroup
    policy: Policy
    sampling: Sampling
    rule: Rule = GREEDY
    expansion: Expansion = "topk"
    eos: Sequence[int] = ()
    criteria: StoppingCriteriaList | None = None
    pad: int = 0
    record: Record | None = None
    times: RoundTimes | None = None
    logprobs: int | None = None
    rows: Rows = field(init=False)
    text: Text = field(init=False)
    committed: Committed = field(init=False)
    states: list[Any] = field(init=False)
    capacity: Capacity = field(init=False)
    offset: Tensor = field(init=False)
    alive: Tensor | None = field(init=False, default=None)
    depth: DepthChoice | None = field(init=False, default=None)
    unseen: list[Committed] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.target.device
        if self.policy.nodes == 1:
            self.drafters = DrafterGroup()
        self.reads_text = bool(self.criteria or self.sampling.on_host)  # on the host
        self.keeps_text = self.reads_text or self.sampling.of_text
        self.set_sampling(self.sampling)

    def set_sampling(self, sampling: Sampling) -> None:
        """Use these seeds and processors from now on."""
        self.sampling = replace(sampling, kernels=self.target.kernels)
        self.children = Children(self.expansion, self.sampling)

    @property
    def lengths(self) -> Tensor:
        """[B] cached tokens of each row, the position of its root."""
        return self.committed.lengths

    def next_policy(self) -> Policy:
        """What grows the next round's tree: the policy, or a level of it where it is adaptive."""
        return self.policy if self.depth is None else self.depth.next()

    def start_text(self, prompts: Tensor, pads: np.ndarray, vocabulary: int) -> None:
        """Take prompts [B, P], padded by `pads` [B] on the left, for the text so far."""
        width, device = prompts.shape[1], prompts.device
        steps = torch.arange(self.policy.max_depth + 1, device=device)  # [A]
        self.offset = torch.from_numpy(pads).to(device).unsqueeze(1) + 1 + steps
        seen, penalty = None, self.sampling.penalty
        if penalty is not None and not self.sampling.readers:
            seen = seen_in(prompts, vocabulary, penalty.prompt_ignore_length)  # [B, V + 1]
        ends = torch.from_numpy(self.rows.special[:-1]).to(device) if self.eos else None
        # A round's tokens stand in no further columns than the cache has slots, and their padding.
        self._padded = in_steps(int(pads.max()) + 1)
        self.text = Text(prompts, width, self.rows.remaining, ends, seen)
        self.text.host_lengths = self.rows.lengths  # arrays that change in place
        self._widen_text()

    def make_space(self, longest: int) -> None:
        """Let cache and text have space for a round whose roots stand at `longest` at most."""
        if longest > self.capacity.longest:
            # Half as many tokens again; twice as many would cost too much memory.
            self.capacity.longest = longest + max(FIRST_TOKENS, longest // 2) - 1
            self.target.reserve(self.capacity.slots)
            self._widen_text()

    def _widen_text(self) -> None:
        if self.keeps_text:
            missing = self.target.cache.capacity + self._padded - self.text.ids.shape[1]
            self.text.ids = pad(self.text.ids, (0, missing), value=self.pad)

    def texts(self) -> list[np.ndarray]:
        """The rows' texts up to their roots, where the host reads texts; [T] int64 each."""
        return texts_of(self.text.ids, self.lengths + self.offset[:, 0])

    def refill_text(self, rows: Tensor, ids: Tensor, count: Tensor) -> None:
        """Rows [R] have the first `count` [R] of tokens ids [R, T] now, without padding."""
        self.text.refill_seen(rows, ids, count)
        if self.keeps_text:
            self.text.ids[:, : ids.shape[1]].index_copy_(0, rows, ids)

    def verified(
        self, tree: TokenTree, logits: Tensor, kept: list[Tensor] | None = None
    ) -> Verified:
        """A tree with the target's logits [B, N, V], for the rule; see `Verified.kept`."""
        if self.keeps_text:
            self.text.lengths = self.lengths + self.offset[:, 0]
        return Verified(tree, logits, self.sampling, self.lengths, self.text, kept)

    def restore_ended_rows(self, count: np.ndarray) -> Tensor:
        """Put rows that have ended back to where they ended, which the device could not know.

        Each of them hands `count` [B] tokens to its drafter. Returns which rows go on, [B] int64.
        """
        committed, rows, device = self.committed, self.rows, self.lengths.device
        known = np.stack([rows.remaining > 0, count, rows.positions, rows.roots])  # [4, B]
        alive, some, lengths, roots = sent(torch.from_numpy(known), device)
        steps, going = torch.arange(committed.tokens.shape[1], device=device), alive > 0
        kept = going.unsqueeze(1) | (steps < some.unsqueeze(1))  # [B, A]
        tokens = torch.where(kept, committed.tokens, roots.unsqueeze(1))
        self.committed = Committed(
            committed.features,
            tokens.clamp(min=0),
            torch.where(going, committed.count, some),
            torch.where(going, committed.lengths, lengths),
        )
        return alive

    def drop_drafters(self) -> None:
        """Decode plainly from now on, since proposals were NaN or infinite."""
        if not self.drafters.members:
            return
        names = " and ".join(type(each).__name__ for each in self.drafters.drafters)
        warnings.warn(
            f"{names} proposed NaN or infinite logits; decoding goes on without drafting, more "
            "slowly: check the weights and dtype.",
            RuntimeWarning,
            stacklevel=2,
        )
        self.drafters, self.states, self.policy = DrafterGroup(), [], ROOT_ONLY
        self.depth, self.unseen = None, []
