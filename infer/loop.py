"""The decode loop: run the prompts, then round after round, for a batch of rows.

A round is in `round`: grow a tree, verify it, accept, commit. `runners` run rounds.
Each ends in one report, from which the host cuts the rows where they end.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headstart.heads import OptionError, TokenTree
from headstart.heads.core import current

from .depth import DepthChoice
from .graphs import RoundGraphs, never_captured_with
from .request import ROOT_ONLY, Capacity, Request
from .round import accept_and_commit, unpack
from .rows import Fault, Rows
from .runners import CapturedRunner, EagerRunner
from .stats import Emitted, Stats
from .trees.policy import Committed, Policy


class Decoding:
    """A request being decoded, once.

    Args:
        graphs: captures rounds and replays them, when given. Rounds whose text somebody reads, or
            whose scores are recorded, run as they are written.

    Attributes:
        faults: takes the rows that cannot go on, and why, where they end alone; None where such a
            row ends the request.
    """

    faults: dict[int, Fault] | None = None

    def __init__(self, request: Request, graphs: RoundGraphs | None = None):
        self.request, self.stats = request, Stats(request.policy.max_depth)
        self.runner = self._runner(graphs)
        if request.times is not None:
            request.depth = DepthChoice(request.times, plain=not self.runner.drafts_always)

    def _runner(self, graphs: RoundGraphs | None) -> EagerRunner | CapturedRunner:
        request = self.request
        if graphs is None or request.reads_text or request.record is not None:
            return EagerRunner(request)
        if (reason := never_captured_with(request.sampling)) is not None:
            graphs.refuse(reason)
            return EagerRunner(request)
        return CapturedRunner(request, graphs)

    def prefill(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Emitted:
        """Run the prompts and emit each row's first token.

        Args:
            ids: [B, P] int64, padded on the left; mask: [B, P], 1 at true tokens.
            new_tokens: at most so many tokens are emitted per row, at least 1.

        Raises:
            OptionError: a prompt has more tokens than the target has positions.
        """
        with current(self.request.device):
            return self._prefill(ids, mask, new_tokens)

    def _prefill(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Emitted:
        request, target, (batch, width) = self.request, self.request.target, ids.shape
        count = mask.sum(1)  # [B]
        pads = width - count.cpu().numpy()
        longest = int(width - pads.min())
        limit = target.limit
        if limit is not None and longest > limit.positions:
            raise OptionError(
                f"the longest prompt has {longest} tokens and the target {limit.positions} "
                f"positions ({limit.reason}); shorten it."
            )
        columns = torch.arange(longest, device=ids.device) + (width - count).unsqueeze(1)
        tokens = ids.gather(1, columns.clamp(max=width - 1))  # [B, T], padded on the right
        behind = self.runner.slots_ahead + request.policy.nodes
        first = self.runner.first_tokens(batch, longest, new_tokens)
        request.capacity = Capacity(longest, new_tokens, behind, first)
        logits, features = target.prefill(tokens, (width - pads).tolist(), request.capacity.slots)
        self.stats.kept_tokens = target.kept_tokens
        vocabulary, context = logits.shape[-1], None if limit is None else limit.positions
        together = bool(request.criteria) and not request.eos and batch > 1
        request.rows = Rows(pads, width, new_tokens, request.eos, vocabulary, context, together)
        if target.kept.last is not None:
            target.kept.last.rows = request.rows  # whose text is kept, too, as far as it comes
        request.start_text(ids, pads, vocabulary)
        self._prompts = ids
        request.states = self.runner.start(batch, request.capacity.most)
        request.drafters.prefill(request.states, features, tokens, count)

        # The last prompt token is the root of a tree of one node, already verified by the prefill.
        last = count - 1
        root = tokens.gather(1, last.unsqueeze(1))  # [B, 1]
        topology, proposal_row = ROOT_ONLY.shape(batch, ids.device)
        tree = TokenTree(root, topology, None, proposal_row)
        features = features.gather(1, last.view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        request.committed = Committed(features, root, torch.ones_like(count), last)
        request.committed, packed = accept_and_commit(request, tree, logits.unsqueeze(1), features)
        emitted = self._take(packed.cpu().numpy(), ROOT_ONLY)
        self.runner.begin()
        return emitted

    def round(self) -> Emitted:
        """Draft, verify, accept and commit once, for every row; finished rows emit nothing."""
        begun = time.perf_counter()
        with current(self.request.device):
            packed, policy = self.runner.next_report()
            seconds = time.perf_counter() - begun
            emitted = self._take(packed, policy)
        if (depth := self.request.depth) is not None:
            depth.note(policy, emitted.nodes, emitted.count > 0, seconds)
        self.stats.add(emitted)
        return emitted

    def settle(self) -> Iterator[Emitted]:
        """End the rounds that have started, without starting another."""
        for report in self.runner.settle():
            with current(self.request.device):
                emitted = self._take(*report)
            self.stats.add(emitted)
            yield emitted

    def run(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Iterator[Emitted]:
        """Prefill and decode until every row has ended, yielding what each step emits."""
        begun = time.perf_counter()
        first = self.prefill(ids, mask, new_tokens)
        self.stats.prefill_seconds = time.perf_counter() - begun
        yield first
        begun = time.perf_counter()
        while not self.finished:
            yield self.round()
        self.stats.decode_seconds = time.perf_counter() - begun

    def _take(self, packed: np.ndarray, policy: Policy) -> Emitted:
        """Cut what a round accepted, whose tree that policy grew, where the rows end."""
        request, rows = self.request, self.request.rows
        tokens, nodes, met, drafter, logprobs, broken = unpack(request, packed, policy)
        emitted, cut = rows.take(nodes, tokens, met, drafter)
        emitted.logprobs, emitted.drafted = logprobs, policy.nodes - 1
        if cut or (rows.ended and not self.runner.holds_ended_rows):
            self.runner.restore_ended_rows(emitted.count)
        if cut and self.faults is None:
            rows.check()
        elif cut and self.faults is not None:
            found = rows.faults()
            self.faults.update(found)
            rows.end([*found])
        if request.record is not None:
            request.record.counts.append(emitted.count)
        if broken is not None:
            broken[[*(self.faults or ())]] = False  # those rows' features are no numbers either
            if (broken & (emitted.count > 0)).any():
                request.drop_drafters()
        return emitted

    @property
    def lengths(self) -> Tensor:
        return self.request.lengths

    @property
    def finished(self) -> bool:
        return self.request.rows.finished

    def remember(self) -> None:
        """Have drafters keep the rows' texts, where they do so."""
        rows, texts = self.request.rows, self.sequences.cpu()
        for text, (start, end) in zip(texts, rows.spans(), strict=True):
            self.request.drafters.remember(text[start:end], self._prompts.shape[1] - start)

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        new = torch.from_numpy(self.request.rows.text(self.request.pad))
        return torch.cat([self._prompts, new.to(self._prompts.device)], 1)
