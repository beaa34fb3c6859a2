"""The decode loop: draft a tree, verify it in one forward, accept, commit; for a whole batch.

Nothing inside a round reads the device from the host. Each round ends in one report, the only thing
that is read: how much each row emitted, how deep it accepted, what it may still emit, its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import Drafter, Sampling, TokenTree

from .policies import Committed, Policy, StaticTree
from .rules import Accepted, Text, accept_matches, target_choices
from .target import Target

_ROOT_ONLY = StaticTree([])


class Stats:
    """What the rounds of a request did. A row-round is one round of one unfinished row.

    Args:
        depth: D of the trees.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._rounds: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # per round: emitted [B], accepted [B]

    def add(self, emitted: np.ndarray, accepted: np.ndarray) -> None:
        """Note one round: tokens emitted [B], and drafted tokens accepted [B] before any cut."""
        self._rounds.append((emitted, accepted))

    def extend(self, other: Stats) -> None:
        """Note another request's rounds too."""
        self._rounds += other._rounds

    @property
    def tokens(self) -> int:
        """Tokens emitted in rounds; the first token of a row, which the prefill gives, is not."""
        return sum(int(emitted.sum()) for emitted, _ in self._rounds)

    @property
    def rounds(self) -> int:
        """Active row-rounds."""
        return sum(int((emitted > 0).sum()) for emitted, _ in self._rounds)

    @property
    def tau(self) -> float:
        """Tokens per round; NaN before the first round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance at depth 1 … D, given that the parent was accepted; NaN where none was."""
        reached = np.zeros(self.depth + 1)
        for emitted, accepted in self._rounds:
            reached += (accepted[emitted > 0, None] >= np.arange(self.depth + 1)).sum(0)
        return [float(b / a) if a else float("nan") for a, b in itertools.pairwise(reached)]


@dataclass(frozen=True)
class Emitted:
    """One round on the host: tokens [B, A] of which the first count [B] of each row are new."""

    tokens: np.ndarray
    count: np.ndarray


class Decoding:
    """One batch of requests being decoded.

    Args:
        target: the runner of the target model.
        drafter: bound to the same model, or None for plain decoding.
        policy: grows the tree; a root-only tree is plain decoding.
        sampling: seeds and processors; see `Sampling`.
        coupled: whether the drafter's children share the target's noise.
        eos: token ids that end a row.
        criteria: further stopping criteria, called after every token as `generate` calls them.
        pad: token id written after a row's end.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        sampling: Sampling,
        *,
        coupled: bool = False,
        eos: Sequence[int] = (),
        criteria: StoppingCriteriaList | None = None,
        pad: int = 0,
    ):
        self.target, self.drafter, self.policy, self.sampling = target, drafter, policy, sampling
        self.noise = sampling if coupled and sampling.seeds is not None else None
        self.eos, self.criteria, self.pad = list(eos), criteria, pad
        self.stats = Stats(policy.max_depth)

    def prefill(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Emitted:
        """Run the prompts and emit each row's first token.

        Args:
            ids: [B, P] int64, padded on the left; mask: [B, P], 1 at true tokens.
            new_tokens: at most so many tokens are emitted per row, at least 1.
        """
        batch, width = ids.shape
        device = ids.device
        depth = self.policy.max_depth
        self.steps = torch.arange(depth + 1, device=device)  # [A]
        count = mask.sum(1)  # [B]
        self._host_pads = width - count.cpu().numpy()
        longest = int(width - self._host_pads.min())
        columns = torch.arange(longest, device=device) + (width - count).unsqueeze(1)
        tokens = ids.gather(1, columns.clamp(max=width - 1))  # [B, T], padded on the right
        self.ends = None
        if self.eos:
            vocab = self.target.model.config.get_text_config(decoder=True).vocab_size
            self.ends = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.ends[torch.tensor(self.eos, device=device)] = True

        logits, features = self.target.prefill(
            tokens, (width - self._host_pads).tolist(), longest + new_tokens + self.policy.nodes
        )
        grown = torch.full((batch, width + new_tokens + depth + 1), self.pad, device=device)
        grown[:, :width] = ids
        self.text = Text(grown, torch.full_like(count, width), np.full(batch, width))
        self.lengths, self.longest = count, longest
        self.remaining = torch.full_like(count, new_tokens)
        self.state = None
        if self.drafter is not None:
            self.state = self.drafter.start(batch, longest + new_tokens + self.policy.nodes)
            self.drafter.prefill(self.state, features, tokens, count)

        # The last prompt token is the root of a tree of one node, already verified by the prefill.
        root = tokens.gather(1, (count - 1).unsqueeze(1))  # [B, 1]
        topology, qrow = _ROOT_ONLY.shape(batch, device)
        tree = TokenTree(root, topology, None, qrow)
        self.lengths = count - 1
        features = features.gather(1, self.lengths.view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        choices = target_choices(tree, logits.unsqueeze(1), self.sampling, self.lengths, self.text)
        return self._emit(accept_matches(tree, choices), features)

    def round(self) -> Emitted:
        """Draft, verify, accept and commit once, for every row; finished rows emit nothing."""
        tree = self.policy.grow(self.drafter, self.state, self.committed, self.noise)
        logits, features = self.target.verify(tree, self.lengths, self.longest)
        choices = target_choices(tree, logits, self.sampling, self.lengths, self.text)
        accepted = accept_matches(tree, choices)
        if not self.policy.in_place:
            self.target.commit(accepted.path)
        emitted = self._emit(accepted, features)
        self.stats.add(emitted.count, self._host_accepted)
        return emitted

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return not self._host_remaining.any()

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        width = int(self.text.host_lengths.max())
        past = torch.arange(width, device=self.text.ids.device) >= self.text.lengths.unsqueeze(1)
        return self.text.ids[:, :width].masked_fill(past, self.pad)

    def _emit(self, accepted: Accepted, features: Tensor) -> Emitted:
        """Cut at the budget and the end token, write the text, and read the round's report.

        Args:
            features: [B, N, F] of the tree's nodes.
        """
        tokens = accepted.tokens  # [B, A]
        steps = self.steps[: tokens.shape[1]]
        columns = self.text.lengths.unsqueeze(1) + steps
        self.text.ids.scatter_(
            1, columns, tokens
        )  # what is cut is overwritten, or padding at the end
        count = torch.minimum(accepted.count, self.remaining)
        stopped = None
        if self.ends is not None:
            count, stopped = _cut_at(self.ends[tokens], count, steps)
        if self.criteria:
            count, met = _cut_at(self._ask_criteria(count, len(steps)), count, steps)
            stopped = met if stopped is None else stopped | met
        self.remaining = self.remaining - count
        if stopped is not None:
            self.remaining = self.remaining.masked_fill(stopped, 0)
        self.lengths = self.lengths + count
        self.text.lengths = self.text.lengths + count
        root = self.text.ids.gather(1, (self.text.lengths - 1).unsqueeze(1))  # [B, 1]
        if self.drafter is not None:
            path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, path)  # [B, A, F]
        self.committed = Committed(features, tokens, count, root, self.lengths)

        drafted = accepted.count - 1
        report = torch.cat([torch.stack([count, drafted, self.remaining], 1), tokens], 1)
        host = report.cpu().numpy()  # the round's one read
        self._host_accepted, self._host_remaining = host[:, 1], host[:, 2]
        self.text.host_lengths = self.text.host_lengths + host[:, 0]
        self.longest = int((self.text.host_lengths - self._host_pads).max()) - 1
        return Emitted(host[:, 3:], host[:, 0])

    def _ask_criteria(self, count: Tensor, steps: int) -> Tensor:
        """Whether the stopping criteria hold after each token [B, A], asked as `generate` asks."""
        met = torch.zeros(len(count), steps, dtype=torch.bool, device=count.device)
        for length in np.unique(self.text.host_lengths):
            mine = self.text.lengths == int(length)
            for step in range(steps):
                text = self.text.ids[:, : int(length) + step + 1]
                answer = self.criteria(text, None)  # type: ignore[misc,arg-type]
                met[:, step] |= answer.to(met.device) & mine
        return met


def _cut_at(ends: Tensor, count: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Shorten `count` [B] to end with the first token that ends its row.

    Args:
        ends: [B, A] bool, which tokens end a row.

    Returns:
        The new count, and which rows ended, both [B].
    """
    ends = ends & (steps < count.unsqueeze(1))
    stopped = ends.any(1)
    first = ends.byte().argmax(1) + 1
    return torch.where(stopped, first, count), stopped
