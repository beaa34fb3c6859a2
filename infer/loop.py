"""The decode loop: run the prompts, then rounds of draft, verify, accept and commit, for a batch.

A round itself is in `round`; `eager` and `captured` run rounds. Each ends in one report, from which
the host cuts the rows where they end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import Drafter, DrafterGroup, OptionError, Sampling, TokenTree

from .captured import CapturedRunner
from .eager import EagerRunner
from .graphs import RoundGraphs
from .record import Record
from .report import Report, unpack
from .request import ROOT_ONLY, Capacity, Request
from .round import accept_and_commit
from .rows import Rows
from .rules.matching import matching
from .rules.registry import Rule
from .rules.rule_api import Text, seen_in
from .stats import Emitted, Stats
from .target import Target
from .trees.policies import Children, Committed, Expansion, Policy


class Decoding:
    """One batch of prompts being decoded.

    Args:
        target: the runner of the target model.
        drafter: one or several, bound to the same model, or None for plain decoding.
        policy: grows the tree; a root-only tree is plain decoding.
        sampling: seeds and processors; see `Sampling`.
        rule: accepts, see `RULES`.
        expansion: how the drafter's children are chosen, see `Children`.
        eos: token ids that end a row.
        criteria: further stopping criteria, called after every token as `generate` calls them.
        pad: token id written after a row's end.
        record: takes the scores and logits of the text, when given.
        graphs: captures rounds and replays them, when given. Rounds whose text somebody reads, or
            whose scores are recorded, run as they are written.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | DrafterGroup | None,
        policy: Policy,
        sampling: Sampling,
        *,
        rule: Rule = matching,
        expansion: Expansion = "topk",
        eos: Sequence[int] = (),
        criteria: StoppingCriteriaList | None = None,
        pad: int = 0,
        record: Record | None = None,
        graphs: RoundGraphs | None = None,
    ):
        group, children = DrafterGroup.of(drafter), Children(expansion, sampling)
        request = Request(target, group, policy, sampling, children, rule, criteria, record, pad)
        if graphs is None or request.reads_text or record is not None:
            self.runner: EagerRunner | CapturedRunner = EagerRunner(request)
        else:
            self.runner = CapturedRunner(request, graphs)
        self.request, self.eos = request, list(eos)
        self.stats = Stats(policy.max_depth)

    def prefill(self, ids: Tensor, mask: Tensor, new_tokens: int) -> Emitted:
        """Run the prompts and emit each row's first token.

        Args:
            ids: [B, P] int64, padded on the left; mask: [B, P], 1 at true tokens.
            new_tokens: at most so many tokens are emitted per row, at least 1.

        Raises:
            OptionError: a prompt has more tokens than the target has positions.
        """
        request, (batch, width), device = self.request, ids.shape, ids.device
        target, depth = request.target, request.policy.max_depth
        count = mask.sum(1)  # [B]
        pads = width - count.cpu().numpy()
        longest = int(width - pads.min())
        limit = target.limit
        if limit is not None and longest > limit.positions:
            raise OptionError(
                f"the longest prompt has {longest} tokens and the target {limit.positions} "
                f"positions ({limit.reason}); shorten it."
            )
        columns = torch.arange(longest, device=device) + (width - count).unsqueeze(1)
        tokens = ids.gather(1, columns.clamp(max=width - 1))  # [B, T], padded on the right
        behind = self.runner.slots_ahead + request.policy.nodes
        request.capacity = Capacity(longest, new_tokens, behind)
        logits, features = target.prefill(tokens, (width - pads).tolist(), request.capacity.slots)
        context = None if limit is None else limit.positions
        together = bool(request.criteria) and not self.eos and batch > 1
        request.rows = Rows(
            pads, width, new_tokens, self.eos, logits.shape[-1], context, together=together
        )
        request.text_columns, self._prompts = int(pads.max()) + depth + 2, ids
        request.offset = width + 1 - count.unsqueeze(1) + torch.arange(depth + 1, device=device)
        request.text = _text_of(request, ids, self.eos, logits.shape[-1])
        request.states = self.runner.start(batch, request.capacity.most)
        request.drafters.prefill(request.states, features, tokens, count)

        # The last prompt token is the root of a tree of one node, already verified by the prefill.
        last = count - 1
        root = tokens.gather(1, last.unsqueeze(1))  # [B, 1]
        topology, proposal_row = ROOT_ONLY.shape(batch, device)
        tree = TokenTree(root, topology, None, proposal_row)
        features = features.gather(1, last.view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        request.committed = Committed(features, root, torch.ones_like(count), root, last)
        request.committed, packed = accept_and_commit(request, tree, logits.unsqueeze(1), features)
        emitted = self._take(unpack(request, packed.cpu().numpy(), 1))
        self.runner.begin()
        return emitted

    def round(self) -> Emitted:
        """Draft, verify, accept and commit once, for every row; finished rows emit nothing.

        Raises:
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        emitted = self._take(self.runner.next_report())
        self.stats.add(emitted)
        return emitted

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

    def _take(self, report: Report) -> Emitted:
        """Cut what a round accepted where the rows end."""
        request, rows, record = self.request, self.request.rows, self.request.record
        emitted, cut = rows.take(report.nodes, report.tokens, report.met)
        if cut:
            self.runner.restore_ended_rows(emitted.count)
            rows.check()
        if request.reads_text:
            request.text.lengths = request.lengths + request.offset[:, 0]
        if record is not None:
            record.count(emitted.count)
        if report.broken is not None and (report.broken & (emitted.count > 0)).any():
            request.drop_drafters()
        return emitted

    @property
    def lengths(self) -> Tensor:
        """[B] cached tokens of each row, the position of its root."""
        return self.request.lengths

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return self.request.rows.finished

    @property
    def sequences(self) -> Tensor:
        """[B, longest] the rows' text in the layout of `generate`, padded after each row's end."""
        prompts, new = self._prompts, self.request.rows.text(self.request.pad)
        return torch.cat([prompts, torch.from_numpy(new).to(prompts.device)], 1)


def _text_of(request: Request, ids: Tensor, eos: Sequence[int], vocabulary: int) -> Text:
    """The text of prompts [B, P], with columns to come where somebody reads it."""
    rows, width, penalty = request.rows, ids.shape[1], request.sampling.penalty
    ends = torch.from_numpy(rows.special[:-1]).to(ids.device) if eos else None
    seen = None
    if penalty is not None and not request.sampling.readers:
        seen = seen_in(ids, vocabulary, penalty.prompt_ignore_length)  # [B, V + 1]
    if request.reads_text:
        missing = request.capacity.longest + request.text_columns - width
        ids = torch.nn.functional.pad(ids, (0, missing), value=request.pad)
    text = Text(ids, width, rows.remaining, ends, seen)
    text.host_lengths = rows.lengths
    return text
