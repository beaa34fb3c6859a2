"""The decode loop: draft a tree, verify it in one forward, accept, commit; for a whole batch.

Nothing inside a round reads the device from the host. Each round ends in one report, the only thing
that is read: how much each row accepted, and its tokens. The host cuts them where the row ends.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import Drafter, OptionError, Sampling, Step, TokenTree
from headstart.heads.group import DrafterGroup, GroupMember

from .graphs import Rounds, addresses, bucket, settings
from .record import Record
from .rows import Rows
from .rules.matching import GREEDY
from .rules.rule import Rule
from .rules.rule_api import Text, Verified, seen_in
from .stats import Emitted, Stats
from .target import Target
from .trees.children import Children, Expansion
from .trees.policy import Committed, Policy
from .trees.static import StaticTree

_ROOT_ONLY = StaticTree([])

_ROOM = 512
"""New tokens that cache and text are first made for; later they grow by half."""


class _Watch:
    """Hands a drafter's proposals on, and keeps what shows a NaN or an infinity among them.

    They cannot harm the text, only its speed, so not every round is watched.
    """

    def __init__(self, drafter: Drafter | GroupMember):
        self.drafter, self.config, self.independent = drafter, drafter.config, drafter.independent
        self._best: list[Tensor] = []  # [B] each: the largest logit, NaN where there is one
        if isinstance(drafter, DrafterGroup):
            self.members = [_Watch(member) for member in drafter.members]
            for member in self.members:
                member._best = self._best

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
        rounds: captures rounds and replays them, when given; while the host reads one report, the
            next round may run. Rounds whose text somebody reads run as they are written.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        sampling: Sampling,
        *,
        rule: Rule = GREEDY,
        expansion: Expansion = "topk",
        eos: Sequence[int] = (),
        criteria: StoppingCriteriaList | None = None,
        pad: int = 0,
        record: Record | None = None,
        rounds: Rounds | None = None,
    ):
        self._read = bool(criteria or sampling.readers)  # whether somebody reads the text
        self._rounds = None if self._read or record is not None else rounds
        if self._rounds is not None:
            self._settings = settings(sampling)
            sampling = self._rounds.keep_sampling(sampling)
        self.target, self.drafter, self.policy, self.sampling = target, drafter, policy, sampling
        self.record, self.rule = record, rule
        self.children = Children(expansion, sampling)
        self.eos, self.criteria, self.pad = list(eos), criteria, pad
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
        pads = width - count.cpu().numpy()
        longest = int(width - pads.min())
        # Text columns that are never all used: rows of short prompts may run ahead of the longest.
        self._width, self._spare = width, int(pads.max()) - width + depth + 2
        limit = self.target.limit
        if limit is not None and longest > limit.positions:
            raise OptionError(
                f"the longest prompt has {longest} tokens and the target {limit.positions} "
                f"positions ({limit.reason}); shorten it."
            )
        columns = torch.arange(longest, device=device) + (width - count).unsqueeze(1)
        tokens = ids.gather(1, columns.clamp(max=width - 1))  # [B, T], padded on the right
        room = min(new_tokens, _ROOM)
        # A round that was begun before the last one was read runs past where its row was to end.
        self._spill = 0 if self._rounds is None else 2 * (depth + 1)
        self._room = self._spill + self.policy.nodes  # slots behind the longest root position
        self._most = longest + new_tokens + self._room  # slots, should all be needed
        self._ample = longest + room - 1  # the longest root position that there is room for
        logits, features = self.target.prefill(
            tokens, (width - pads).tolist(), longest + room + self._room
        )
        together = bool(self.criteria) and not self.eos and batch > 1
        context = None if limit is None else limit.positions
        self.rows = Rows(
            pads, width, new_tokens, self.eos, logits.shape[-1], context, together=together
        )
        text = ids
        if self._read:
            text = torch.full((batch, self._columns()), self.pad, device=device)
            text[:, :width] = ids
        ends = torch.from_numpy(self.rows.special[:-1]).to(device) if self.eos else None
        rounds = self._rounds
        if rounds is not None and ends is not None:
            ends = rounds.keep("ends", ends)
        seen, penalty = None, self.sampling.penalty
        if penalty is not None and not self.sampling.readers:
            seen = seen_in(ids, logits.shape[-1], penalty.prompt_ignore_length)  # [B, V + 1]
            seen = seen if rounds is None else rounds.keep("seen", seen)
        self.text = Text(text, width, self.rows.remaining, ends, seen)
        self._to_columns = width + 1 - count.unsqueeze(1) + self.steps  # [B, A], from `lengths`
        self._prompt = ids
        self.state = self._watch = self._alive = None
        self._round, self._waiting, self._one = 0, deque(), np.ones(batch, dtype=int)
        if self.drafter is not None:
            if rounds is None:
                self.state = self.drafter.start(batch, self._most)
            else:
                self.state = rounds.state(self.drafter, batch, self._most)
            self.drafter.prefill(self.state, features, tokens, count)

        # The last prompt token is the root of a tree of one node, already verified by the prefill.
        root = tokens.gather(1, (count - 1).unsqueeze(1))  # [B, 1]
        topology, proposal_row = _ROOT_ONLY.shape(batch, device)
        tree = TokenTree(root, topology, None, proposal_row)
        last = count - 1
        features = features.gather(1, last.view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        self.committed = Committed(features, root, torch.ones_like(count), root, last)
        self.committed, report = self._accept(tree, logits.unsqueeze(1), features)
        emitted = self._hear(report.cpu().numpy(), 1)
        if rounds is not None:
            self.committed = rounds.keep_committed(self.committed)
            self._alive = rounds.keep("alive", torch.from_numpy(self.rows.remaining > 0).to(count))
        return emitted

    @property
    def lengths(self) -> Tensor:
        """[B] cached tokens of each row, the position of its root."""
        return self.committed.lengths

    def round(self) -> Emitted:
        """Draft, verify, accept and commit once, for every row; finished rows emit nothing.

        Raises:
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        if not self._waiting:
            self._launch()
        # Another may start while this one is read, but not where a row will have used its budget.
        if self._rounds is not None and self.rows.free > self._waiting[0][1]:
            self._launch()
        read, steps = self._waiting.popleft()
        emitted = self._hear(read(), steps)
        self.stats.add(emitted)
        return emitted

    def _launch(self) -> None:
        """Start a round."""
        longest = self.rows.longest
        if self._waiting:
            longest += sum(steps for _, steps in self._waiting)
        if longest > self._ample:
            self._grow(longest)
        watch = None
        if self.drafter is not None and (self._rounds or self._round < 16 or self._round % 8 == 0):
            watch = _Watch(self.drafter)
        self._round += 1
        if self._rounds is not None:
            read = self._rounds.send(self._captured(self._rounds, watch, longest))
        else:
            if self.drafter is not None:
                self.drafter.reserve(self.state, longest, self._room)
            self.committed, report = self._step(watch, longest, self.rows.even)
            read = lambda: report.cpu().numpy()  # noqa: E731 - as `send` answers
        self._waiting.append((read, self.committed.tokens.shape[1]))

    def _captured(self, rounds: Rounds, watch: _Watch | None, longest: int) -> Tensor:
        """Do a round on tensors that stay, perhaps by replaying it; returns its report."""
        capacity, drafter = self.target.cache.capacity - self.policy.nodes, self.drafter
        # Tree attention reads lengths on the device: one graph serves all, where drafters let it.
        if self.target.windows.tree and (drafter is None or not drafter.needs_length_bound):
            longest = capacity
        else:
            longest = min(bucket(longest + self._spill), capacity)
        if drafter is not None:
            drafter.reserve(self.state, longest, self._room)
            rounds.keep_state(self.state)
        weight = self.target.model.get_input_embeddings().weight  # another one after a move
        kind = (
            *(self.policy, drafter, self.rule, self.children.expansion, self._settings),
            *(self.committed.tokens.shape, longest, self.text.ends is None),
            addresses(self.target.cache, self.state, weight),
        )

        def work() -> tuple[Committed, Tensor]:
            committed, report = self._step(watch, longest, False)
            rounds.keep_state(self.state)
            return rounds.keep_committed(committed), rounds.keep("report", report)

        self.committed, report = rounds.run(kind, work)
        return report

    def _step(self, watch: _Watch | None, longest: int, even: bool) -> tuple[Committed, Tensor]:
        """Draft, verify, accept and commit, on the device alone.

        Args:
            longest: a bound on the roots' positions; even: whether they are all equal to it.

        Returns:
            What the next round starts from, and what the host should know of this one.
        """
        drafter: Any = watch or self.drafter
        self._watch = watch
        tree = self.policy.grow(drafter, self.state, self.committed, self.children)
        logits, features = self.target.verify(tree, self.lengths, longest, even)
        return self._accept(tree, logits, features)

    def _accept(
        self, tree: TokenTree, logits: Tensor, features: Tensor
    ) -> tuple[Committed, Tensor]:
        """Choose a path and keep it; see `_step`.

        Args:
            features: [B, N, F] of the tree's nodes.
        """
        scores = None if self.record is None else []
        verified = Verified(tree, logits, self.sampling, self.lengths, self.text, scores)
        accepted = self.rule.accept(verified)
        if not self.policy.in_place and tree.nodes > 1:
            self.target.commit(accepted.path)
        self._noted = (accepted.path, scores[0], logits) if scores else None
        tokens, count = accepted.tokens, accepted.count  # [B, A], [B]
        report = self._report(tokens, count)
        if self.text.seen is not None:
            self.text.seen.scatter_(1, tokens.clamp(min=0), True)
        if self._alive is not None:
            # The next round may begin before anybody has looked at these tokens.
            count, tokens = count * self._alive, tokens.clamp(min=0)
        # Past a path's end its last token stands again.
        root = tokens[:, -1:] if tokens.shape[1] > 1 else tokens  # [B, 1]
        if self.drafter is not None:
            path = accepted.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, path)  # [B, A, F]
        return Committed(features, tokens, count, root, self.lengths + count), report

    def _grow(self, longest: int) -> None:
        """Make room for half as many tokens again; twice as many would cost too much memory."""
        more = max(_ROOM, longest // 2)
        self.target.reserve(min(longest + more + self._room, self._most))
        self._ample = longest + more - 1
        if self._read:
            missing = self._columns() - self.text.ids.shape[1]
            self.text.ids = torch.nn.functional.pad(self.text.ids, (0, missing), value=self.pad)

    def _columns(self) -> int:
        """Columns of text that rounds may write while the longest row has ample room."""
        return self._width + self._ample + self._spare

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return self.rows.finished

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        new = torch.from_numpy(self.rows.text(self.pad)).to(self._prompt.device)
        return torch.cat([self._prompt, new], 1)

    def _report(self, tokens: Tensor, count: Tensor) -> Tensor:
        """What the host reads of a round: tokens [B, A] and nodes [B] of the accepted path.

        Also after which tokens [B, A] the criteria held, and which rows' proposals [B] were no
        ranking, where somebody asked.
        """
        steps = tokens.shape[1]
        report = [tokens, count] if steps > 1 else [tokens]
        if self._read:
            # What is cut is overwritten, or padding at the end. Nobody is shown an id below 0.
            columns = self.lengths.unsqueeze(1) + self._to_columns[:, :steps]
            self.text.ids.scatter_(1, columns, tokens.clamp(min=0))
        if self.criteria:
            report.append(self._ask_criteria(steps))
        broken = None if self._watch is None else self._watch.broken()
        if broken is not None:
            report.append(broken)
        return torch.cat([part.flatten() for part in report]) if len(report) > 1 else tokens

    def _hear(self, report: np.ndarray, steps: int) -> Emitted:
        """Take a round's report, of paths of at most so many nodes; see `_report`."""
        batch = len(self.rows.remaining)
        size, met, nodes = batch * steps, None, self._one
        tokens, rest = report[:size].reshape(batch, steps), report[size:]
        if steps > 1:
            nodes, rest = rest[:batch], rest[batch:]
        if self.criteria:
            met, rest = rest[:size].reshape(batch, steps) > 0, rest[size:]
        emitted, looked = self.rows.take(nodes, tokens, met)
        self.text.host_lengths, self.text.remaining = self.rows.lengths, self.rows.remaining
        if looked:
            self._rest(emitted.count)
        if self._read:
            self.text.lengths = self.lengths + self._to_columns[:, 0]
        if self.record is not None and self._noted is not None:
            path, scores, logits = self._noted
            self.record.add(path, emitted.count, scores=scores, logits=logits)
        if looked:
            self.rows.check()
        if rest.size and (rest[emitted.count > 0] > 0).any():  # proposals that were no ranking
            self._go_on_without()
        return emitted

    def _rest(self, count: np.ndarray) -> None:
        """Leave rows that have ended where they ended, which the device could not know.

        Args:
            count: [B], how many of a round's tokens were kept.
        """
        committed, device = self.committed, self.lengths.device
        alive = torch.from_numpy(self.rows.remaining > 0).to(device)
        ended = {
            "count": np.zeros_like(count) if self._waiting else count,  # another round took them
            "lengths": self.rows.positions,
            "root": self.rows.roots[:, None],
        }
        found = {"tokens": committed.tokens.clamp(min=0)}  # past an end token there may be none
        for name, values in ended.items():
            here: Tensor = getattr(committed, name)
            going = alive if here.dim() == 1 else alive.unsqueeze(1)
            found[name] = torch.where(going, here, torch.from_numpy(values).to(device))
        self.committed = replace(committed, **found)
        if self._rounds is not None:
            self.committed = self._rounds.keep_committed(self.committed)
            self._alive = self._rounds.keep("alive", alive.long())

    def _go_on_without(self) -> None:
        """Decode plainly from now on."""
        if self.drafter is None:
            return
        warnings.warn(
            f"{type(self.drafter).__name__} proposed NaN or infinite logits; decoding goes on "
            "without it, more slowly: check its weights and dtype.",
            RuntimeWarning,
            stacklevel=2,
        )
        self.drafter, self.policy = None, _ROOT_ONLY

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
