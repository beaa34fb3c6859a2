"""The decode loop: draft a tree, verify it in one forward, accept, commit; for a whole batch.

Nothing inside a round reads the device from the host. Each round ends in one report, the only thing
that is read: how much each row accepted, and its tokens. The host cuts them where the row ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import DecodingError, Drafter, OptionError, Sampling, Step, TokenTree

from .choices import matching
from .policies import Children, Committed, Expansion, Policy, StaticTree
from .record import Record
from .rules import Rule
from .stats import Emitted, Stats
from .target import Target
from .verified import Accepted, Text, Verified

_ROOT_ONLY = StaticTree([])

_ROOM = 512
"""New tokens that cache and text are first made for; later they grow by half."""

_NEVER = 1 << 60


class _Watch:
    """Hands a drafter's proposals on, and keeps what shows a NaN or an infinity among them.

    They cannot harm the text, only its speed, so not every round is watched.
    """

    def __init__(self, drafter: Drafter):
        self.drafter, self.independent = drafter, drafter.independent
        self._best: list[Tensor] = []  # [B] each: the largest logit, NaN where there is one

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        return self._note(self.drafter.begin(state, features, tokens, count))

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        return self._note(self.drafter.extend(state, tokens, parent))

    def _note(self, step: Step) -> Step:
        if step.logits is not None:
            self._best.append(step.logits.amax((1, 2)))
        return step

    def broken(self) -> Tensor | None:
        """[B] bool, whose proposals of this round are no ranking; None when none had logits."""
        if not self._best:
            return None
        best = self._best[0] if len(self._best) == 1 else torch.stack(self._best).amax(0)
        return (best - best).isnan()


class Decoding:
    """One batch of requests being decoded.

    Args:
        target: the runner of the target model.
        drafter: bound to the same model, or None for plain decoding.
        policy: grows the tree; a root-only tree is plain decoding.
        sampling: seeds and processors; see `Sampling`.
        rule: accepts, see `RULES`.
        expansion: how the drafter's children are chosen, see `Children`.
        eos: token ids that end a row.
        criteria: further stopping criteria, called after every token as `generate` calls them.
        pad: token id written after a row's end.
        record: takes the scores and logits of the text, when given.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        sampling: Sampling,
        *,
        rule: Rule = matching,
        expansion: Expansion = "topk",
        eos: Sequence[int] = (),
        criteria: StoppingCriteriaList | None = None,
        pad: int = 0,
        record: Record | None = None,
    ):
        self.target, self.drafter, self.policy, self.sampling = target, drafter, policy, sampling
        self.record, self.rule = record, rule
        self.children = Children(expansion, sampling)
        self.eos, self.criteria, self.pad = list(eos), criteria, pad
        self._read = bool(criteria) or not sampling.rowwise  # whether somebody reads the text
        self.stats = Stats(policy.max_depth)

    def prefill(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Emitted:
        """Run the prompts and emit each row's first token.

        Args:
            ids: [B, P] int64, padded on the left; mask: [B, P], 1 at true tokens.
            new_tokens: at most so many tokens are emitted per row, at least 1.

        Raises:
            OptionError: a prompt has more tokens than the target has positions.
        """
        batch, width = ids.shape
        device = ids.device
        depth = self.policy.max_depth
        self.steps = torch.arange(depth + 1, device=device)  # [A]
        count = mask.sum(1)  # [B]
        self._host_pads = width - count.cpu().numpy()
        longest = int(width - self._host_pads.min())
        # Text columns that are never all used: rows of short prompts may run ahead of the longest.
        self._width, self._spare = width, int(self._host_pads.max()) - width + depth + 2
        limit = self.target.limit
        self._context = None if limit is None else limit.positions
        if limit is not None and longest > limit.positions:
            raise OptionError(
                f"the longest prompt has {longest} tokens and the target {limit.positions} "
                f"positions ({limit.reason}); shorten it."
            )
        columns = torch.arange(longest, device=device) + (width - count).unsqueeze(1)
        tokens = ids.gather(1, columns.clamp(max=width - 1))  # [B, T], padded on the right
        # Without an end token `generate` lets rows write on until the criteria held for all.
        self._held = None
        if self.criteria and not self.eos and batch > 1:
            self._held = np.full(batch, _NEVER)  # [B] text length where they first did

        room = min(new_tokens, _ROOM)
        self._most = longest + new_tokens + self.policy.nodes  # slots, should all be needed
        self._ample = longest + room - 1  # the longest root position that there is room for
        logits, features = self.target.prefill(
            tokens, (width - self._host_pads).tolist(), longest + room + self.policy.nodes
        )
        # The tokens that need a second look: end tokens, and -1, which finds the last entry.
        self._special = np.zeros(logits.shape[-1] + 1, dtype=bool)
        self._special[[token for token in self.eos if 0 <= token < logits.shape[-1]]] = True
        self._special[-1] = True
        self._remaining, self._ones = np.full(batch, new_tokens), np.ones(batch, dtype=int)
        self._free = 0  # so many tokens every row may emit before a bound cuts it, or more
        text = ids
        if self._read:
            text = torch.full((batch, self._columns()), self.pad, device=device)
            text[:, :width] = ids
        ends = torch.from_numpy(self._special[:-1]).to(device) if self.eos else None
        self.text = Text(text, width, self._remaining, ends)
        self._to_columns = width + 1 - count.unsqueeze(1) + self.steps  # [B, A], from `lengths`
        self._prompt, self._emitted = ids, []
        self.longest, self._even = longest - 1, True  # the last prompt token is the root below
        self.state = self._watch = None
        self._round = 0
        if self.drafter is not None:
            self.state = self.drafter.start(batch, self._most)
            self.drafter.prefill(self.state, features, tokens, count)

        # The last prompt token is the root of a tree of one node, already verified by the prefill.
        root = tokens.gather(1, (count - 1).unsqueeze(1))  # [B, 1]
        topology, qrow = _ROOT_ONLY.shape(batch, device)
        tree = TokenTree(root, topology, None, qrow)
        self.lengths = count - 1
        features = features.gather(1, self.lengths.view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        return self._accept(tree, logits.unsqueeze(1), features)

    def round(self) -> Emitted:
        """Draft, verify, accept and commit once, for every row; finished rows emit nothing.

        Raises:
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        if self.longest > self._ample:
            self._grow()
        drafter: Any = self.drafter
        self._watch = None
        if drafter is not None:
            drafter.tell(self.state, self.longest)
        if drafter is not None and (self._round < 16 or self._round % 8 == 0):
            drafter = self._watch = _Watch(drafter)
        self._round += 1
        tree = self.policy.grow(drafter, self.state, self.committed, self.children)
        logits, features = self.target.verify(tree, self.lengths, self.longest, self._even)
        emitted = self._accept(tree, logits, features)
        self.stats.add(emitted)
        return emitted

    def _accept(self, tree: TokenTree, logits: Tensor, features: Tensor) -> Emitted:
        scores = None if self.record is None else []
        verified = Verified(tree, logits, self.sampling, self.lengths, self.text, scores)
        accepted = self.rule(verified)
        if not self.policy.in_place and tree.nodes > 1:
            self.target.commit(accepted.path)
        emitted = self._emit(accepted, features)
        if self.record is not None and scores:
            self.record.add(accepted.path, emitted.count, scores=scores[0], logits=logits)
        return emitted

    def _grow(self) -> None:
        """Make room for half as many tokens again; twice as many would cost too much memory."""
        more = max(_ROOM, self.longest // 2)
        slots = min(self.longest + more + self.policy.nodes, self._most)
        self.target.reserve(slots)
        self._ample = self.longest + more - 1
        if self._read:
            missing = self._columns() - self.text.ids.shape[1]
            self.text.ids = torch.nn.functional.pad(self.text.ids, (0, missing), value=self.pad)

    def _columns(self) -> int:
        """Columns of text that rounds may write while the longest row has ample room."""
        return self._width + self._ample + self._spare

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return self._free <= 0 and not self._remaining.any()

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        width = int(self.text.host_lengths.max())
        if self._held is not None:
            width = min(width, int(self._held.max()))
        tokens = np.concatenate([emitted.tokens for emitted in self._emitted], 1)
        true = np.concatenate(
            [np.arange(e.tokens.shape[1]) < e.count[:, None] for e in self._emitted], 1
        )
        new = self.text.host_lengths[:, None] - self._width
        text = np.full((len(new), int(new.max())), self.pad)
        text[np.arange(text.shape[1]) < new] = tokens[true]
        written = torch.from_numpy(text).to(self._prompt.device)
        return torch.cat([self._prompt, written], 1)[:, :width]

    def _hear(
        self, tokens: Tensor, reached: Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The round's one read: nodes [B] and tokens [B, A] of the accepted path.

        Also after which tokens [B, A] the criteria held, and which rows' proposals [B] were no
        ranking; None where nobody asked.
        """
        batch, steps = tokens.shape
        report = [tokens, reached] if steps > 1 else [tokens]
        if self._read:
            # What is cut is overwritten, or padding at the end. Nobody is shown an id below 0.
            columns = self.lengths.unsqueeze(1) + self._to_columns[:, :steps]
            self.text.ids.scatter_(1, columns, tokens.clamp(min=0))
        if self.criteria:
            report.append(self._ask_criteria(steps))
        broken = None if self._watch is None else self._watch.broken()
        if broken is not None:
            report.append(broken)
        whole = torch.cat([part.flatten() for part in report]) if len(report) > 1 else tokens
        host = whole.cpu().numpy().ravel()

        size, met, bad = batch * steps, None, None
        nodes = host[size : size + batch] if steps > 1 else self._ones
        if broken is not None:
            bad, host = host[-batch:] > 0, host[:-batch]
        if self.criteria:
            met = host[-size:].reshape(batch, steps) > 0
        return nodes, host[:size].reshape(batch, steps), met, bad

    def _emit(self, accepted: Accepted, features: Tensor) -> Emitted:
        """Read what a round accepted, cut it at the budget and the end token, and go on from there.

        Args:
            features: [B, N, F] of the tree's nodes.
        """
        tokens, reached = accepted.tokens, accepted.count  # [B, A], [B]
        batch, steps = tokens.shape
        nodes, written, met, broken = self._hear(tokens, reached)
        count, text = nodes, self.text
        looked = met is not None or self._free <= steps or self._special[written].any()
        if looked:
            count = self._cut(nodes, written, met)
            reached = torch.from_numpy(count).to(reached.device)
            tokens = tokens.clamp(min=0)  # past an end token there may be none
        else:
            self._free -= steps
            self._remaining = text.remaining = self._remaining - count
            text.host_lengths = text.host_lengths + count
        root = tokens[:, -1:] if steps > 1 else tokens  # [B, 1]
        if looked:
            root = tokens.gather(1, (reached - 1).clamp(min=0).unsqueeze(1))
            if self._emitted:  # rows that have ended stay where they are
                root = torch.where(reached.unsqueeze(1) > 0, root, self.committed.root)
        self.lengths = self.lengths + reached
        if self._read:
            self.text.lengths = self.lengths + self._to_columns[:, 0]
        if self.drafter is not None:
            path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, path)  # [B, A, F]
        self.committed = Committed(features, tokens, reached, root, self.lengths)

        emitted = Emitted(count, nodes, written)
        self._emitted.append(emitted)
        if batch == 1:
            self.longest += int(count[0])
        else:
            positions = text.host_lengths - self._host_pads - 1  # [B] of the roots to come
            self.longest = int(positions.max())
            self._even = int(positions.min()) == self.longest
        if looked or (broken is not None and broken.any()):
            self._inspect(emitted, np.zeros(batch, bool) if broken is None else broken)
        return emitted

    def _cut(self, nodes: np.ndarray, tokens: np.ndarray, met: np.ndarray | None) -> np.ndarray:
        """How many of the tokens [B, A] are kept, [B], given the nodes that were accepted.

        Args:
            met: [B, A] bool, after which tokens the criteria held.
        """
        text = self.text
        count = np.minimum(nodes, self._remaining)
        room = _NEVER
        if self._context is not None:
            # Nodes past the last position ran at a wrong one.
            room = self._context - (text.host_lengths - self._host_pads - 1)
            count = np.minimum(count, room)
        count, stopped = _cut_at(self._special[tokens] & (tokens >= 0), count)
        if met is not None and self._held is not None:
            self._hold(met, count)
        elif met is not None:
            count, also = _cut_at(met, count)
            stopped = stopped | also
        text.host_lengths = text.host_lengths + count
        remaining = self._remaining - count
        remaining[stopped] = 0
        if self._held is not None:
            to_go = (self._held.max() - text.host_lengths).clip(0)
            remaining = np.minimum(remaining, to_go)
        self._remaining = text.remaining = remaining
        self._free = int(np.minimum(remaining, room - count).min())
        return count

    def _inspect(self, last: Emitted, broken: np.ndarray) -> None:
        """Look for what went wrong in a round.

        Args:
            broken: [B], the rows whose proposals were no ranking.
        """
        rows = np.arange(len(last.count))
        written = self.text.host_lengths - self._width
        active = last.count > 0
        for row in rows[active & (last.tokens[rows, last.count - 1] < 0)]:
            raise DecodingError(
                f"the target's scores for new token {written[row]} of row {row} are NaN or "
                "infinite; load it in float32 or bfloat16, and check its weights and processors."
            )
        reached = self.text.host_lengths - self._host_pads - 1
        for row in rows[(self._remaining > 0) & (reached >= (self._context or _NEVER))]:
            raise DecodingError(
                f"row {row} has used all {self._context} positions of the target after "
                f"{written[row]} new tokens; set max_new_tokens to at most that."
            )
        if (broken & active).any() and self.drafter is not None:
            warnings.warn(
                f"{type(self.drafter).__name__} proposed NaN or infinite logits; decoding goes on "
                "without it, more slowly: check its weights and dtype.",
                RuntimeWarning,
                stacklevel=2,
            )
            self.drafter = None
            self.policy = _ROOT_ONLY

    def _hold(self, met: np.ndarray, count: np.ndarray) -> None:
        """Note in `_held` where each row's criteria first held, without ending the row."""
        met = met & (np.arange(met.shape[1]) < count[:, None])
        place = np.where(met.any(1), self.text.host_lengths + met.argmax(1) + 1, _NEVER)
        assert self._held is not None
        self._held = np.minimum(self._held, place)

    def _ask_criteria(self, steps: int) -> Tensor:
        """Whether the stopping criteria hold after each token [B, A], asked as `generate` asks."""
        met = torch.zeros(len(self.lengths), steps, dtype=torch.bool, device=self.lengths.device)
        for length in np.unique(self.text.host_lengths):
            mine = self.text.lengths == int(length)
            for step in range(steps):
                text = self.text.ids[:, : int(length) + step + 1]
                answer = self.criteria(text, None)  # type: ignore[misc,arg-type]
                met[:, step] |= answer.to(met.device) & mine
        return met


def _cut_at(ends: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shorten `count` [B] to end with the first token that ends its row.

    Args:
        ends: [B, A] bool, which tokens end a row.

    Returns:
        The new count, and which rows ended, both [B].
    """
    ends = ends & (np.arange(ends.shape[1]) < count[:, None])
    stopped = np.logical_or.reduce(ends, 1)
    return np.where(stopped, ends.argmax(1) + 1, count), stopped
