"""The decode loop: draft a tree, verify it in one forward, accept, commit; for a whole batch.

Nothing inside a round reads the device from the host. Each round ends in one report, the only thing
that is read: how much each row emitted, how deep it accepted, what it may still emit, its tokens.
"""

from __future__ import annotations

import itertools
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
from .target import Target
from .verified import Accepted, Text, Verified

_ROOT_ONLY = StaticTree([])

_ROOM = 512
"""New tokens that cache and text are first made for; later they grow by half."""

_NEVER = 1 << 60


class Emitted:
    """One round's report, on the host; what it holds is cut out when asked for.

    Args:
        host: [(3 + A) * B] int64: count, nodes and remaining of each row, and the tokens.
        batch: B.
    """

    def __init__(self, host: np.ndarray, batch: int):
        self.host, self.batch = host, batch

    @property
    def count(self) -> np.ndarray:
        """[B] how many of each row's tokens are new."""
        return self.host[: self.batch]

    @property
    def nodes(self) -> np.ndarray:
        """[B] nodes on the accepted path before any cut, the root counted.

        -1 where the drafter's proposals were no ranking.
        """
        return self.host[self.batch : 2 * self.batch]

    @property
    def remaining(self) -> np.ndarray:
        """[B] tokens that each row may still emit."""
        return self.host[2 * self.batch : 3 * self.batch]

    @property
    def tokens(self) -> np.ndarray:
        """[B, A] the tokens, the new ones first."""
        return self.host[3 * self.batch :].reshape(self.batch, -1)


class Stats:
    """What the rounds of a request did. A row-round is one round of one unfinished row.

    Args:
        depth: D of the trees.

    Attributes:
        prefill_seconds: until the first token was there.
        decode_seconds: from the first token to the last; what a streamer did with them counts too.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.prefill_seconds = self.decode_seconds = 0.0
        self._rounds: list[Emitted] = []

    def add(self, emitted: Emitted) -> None:
        """Note one round."""
        self._rounds.append(emitted)

    def extend(self, other: Stats) -> None:
        """Note another request's rounds too."""
        self._rounds += other._rounds

    @property
    def tokens(self) -> int:
        """Tokens emitted in rounds; the first token of a row, which the prefill gives, is not."""
        return sum(int(emitted.count.sum()) for emitted in self._rounds)

    @property
    def rounds(self) -> int:
        """Active row-rounds."""
        return sum(int((emitted.count > 0).sum()) for emitted in self._rounds)

    @property
    def tau(self) -> float:
        """Tokens per round; NaN before the first round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance at depth 1 … D, given that the parent was accepted; NaN where none was."""
        reached = np.zeros(self.depth + 1)
        for emitted in self._rounds:
            nodes = emitted.nodes[emitted.count > 0, None]
            reached += (nodes > np.arange(self.depth + 1)).sum(0)
        return [float(b / a) if a else float("nan") for a, b in itertools.pairwise(reached)]


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
        self._read = bool(criteria or sampling.processors)  # whether somebody reads the text
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
        ends = None
        if self.eos:
            vocab = self.target.model.config.get_text_config(decoder=True).vocab_size
            ends = torch.zeros(vocab, dtype=torch.bool, device=device)
            known = [token for token in self.eos if 0 <= token < vocab]
            ends[torch.tensor(known, dtype=torch.long, device=device)] = True
        # Without an end token `generate` lets rows write on until the criteria held for all.
        self._held = None
        if self.criteria and not self.eos and batch > 1:
            self._held = torch.full_like(count, _NEVER)  # [B] text length where they first did

        room = min(new_tokens, _ROOM)
        self._most = longest + new_tokens + self.policy.nodes  # slots, should all be needed
        self._ample = longest + room - 1  # the longest root position that there is room for
        logits, features = self.target.prefill(
            tokens, (width - self._host_pads).tolist(), longest + room + self.policy.nodes
        )
        text = torch.full((batch, self._columns()), self.pad, device=device)
        text[:, :width] = ids
        self.remaining = torch.full_like(count, new_tokens)
        self.text = Text(text, width, self.remaining, ends)
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
            count = self.committed.count
            self.record.add(accepted.path, count, scores=scores[0], logits=logits)
        return emitted

    def _grow(self) -> None:
        """Make room for half as many tokens again; twice as many would cost too much memory."""
        more = max(_ROOM, self.longest // 2)
        slots = min(self.longest + more + self.policy.nodes, self._most)
        self.target.reserve(slots)
        self._ample = self.longest + more - 1
        missing = self._columns() - self.text.ids.shape[1]
        self.text.ids = torch.nn.functional.pad(self.text.ids, (0, missing), value=self.pad)

    def _columns(self) -> int:
        """Columns of text that rounds may write while the longest row has ample room."""
        return self._width + self._ample + self._spare

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return not self._last.remaining.any()

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        width = int(self.text.host_lengths.max())
        if self._held is not None:
            width = min(width, int(self._held.max()))
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
        # What is cut is overwritten, or padding at the end. Nobody is shown an id below 0.
        written = tokens.clamp(min=0) if self._read else tokens
        self.text.ids.scatter_(1, columns, written)
        count = torch.minimum(accepted.count, self.remaining)
        if self._context is not None and self.longest + len(steps) > self._context:
            # Nodes past the last position ran at a wrong one.
            count = torch.minimum(count, self._context - self.lengths)
        stopped = None
        if self.text.ends is not None:
            ends = self.text.ends.index_select(0, tokens.flatten().clamp(min=0))
            count, stopped = _cut_at(ends.view_as(tokens), count, steps)
        if self.criteria:
            met = self._ask_criteria(count, len(steps))
            if self._held is not None:
                self._hold(met, count, steps)
            else:
                count, met = _cut_at(met, count, steps)
                stopped = met if stopped is None else stopped | met
        self.remaining = self.remaining - count
        if stopped is not None:
            self.remaining = self.remaining.masked_fill(stopped, 0)
        self.lengths = self.lengths + count
        self.text.lengths = self.text.lengths + count
        if self._held is not None:
            to_go = (self._held.amax() - self.text.lengths).clamp(min=0)
            self.remaining = torch.minimum(self.remaining, to_go)
        self.text.remaining = self.remaining
        root = tokens  # [B, 1]
        if len(steps) > 1:
            root = self.text.ids.gather(1, (self.text.lengths - 1).unsqueeze(1))
        if self.drafter is not None:
            path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, path)  # [B, A, F]
        self.committed = Committed(features, tokens, count, root, self.lengths)

        path_nodes = accepted.count
        if self._watch is not None and (broken := self._watch.broken()) is not None:
            path_nodes = path_nodes.masked_fill(broken, -1)
        report = torch.cat([count, path_nodes, self.remaining, tokens.flatten()])
        host = report.cpu().numpy()  # the round's one read
        self._last = Emitted(host, len(count))
        self.text.hear(self._last.count)
        if len(count) == 1:
            self.longest += int(host[0])
            odd = min(host[1], host[2 + host[0]])  # the nodes, and the last token
        else:
            reached = self.text.host_lengths - self._host_pads
            self.longest = int(reached.max()) - 1
            self._even = int(reached.min()) == self.longest + 1
            odd = host.min()  # of whatever, to be looked at
        if odd < 0 or (self._context is not None and self.longest >= self._context):
            self._inspect(self._last)
        return self._last

    def _inspect(self, last: Emitted) -> None:
        """Look for what went wrong in a round: -1 as the last token, or as the path's nodes."""
        rows = np.arange(len(last.count))
        written = self.text.host_lengths - self._width
        active = last.count > 0
        for row in rows[active & (last.tokens[rows, last.count - 1] < 0)]:
            raise DecodingError(
                f"the target's scores for new token {written[row]} of row {row} are NaN or "
                "infinite; load it in float32 or bfloat16, and check its weights and processors."
            )
        reached = self.text.host_lengths - self._host_pads - 1
        for row in rows[(last.remaining > 0) & (reached >= (self._context or _NEVER))]:
            raise DecodingError(
                f"row {row} has used all {self._context} positions of the target after "
                f"{written[row]} new tokens; set max_new_tokens to at most that."
            )
        if ((last.nodes < 0) & active).any() and self.drafter is not None:
            warnings.warn(
                f"{type(self.drafter).__name__} proposed NaN or infinite logits; decoding goes on "
                "without it, more slowly: check its weights and dtype.",
                RuntimeWarning,
                stacklevel=2,
            )
            self.drafter = None
            self.policy = _ROOT_ONLY

    def _hold(self, met: Tensor, count: Tensor, steps: Tensor) -> None:
        """Note in `_held` where each row's criteria first held, without ending the row."""
        met = met & (steps < count.unsqueeze(1))
        place = torch.where(met.any(1), self.text.lengths + met.byte().argmax(1) + 1, _NEVER)
        assert self._held is not None
        self._held = torch.minimum(self._held, place)

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
    if len(steps) == 1:
        return count, ends.squeeze(1) & (count > 0)
    ends = ends & (steps < count.unsqueeze(1))
    stopped = ends.any(1)
    first = ends.byte().argmax(1) + 1
    return torch.where(stopped, first, count), stopped
