"""Continuous batching: prompts decoded in a batch whose rows are filled anew as they end.

A row that has ended is given the next prompt: that is run by itself, in a small batch with others
that begin now, and its keys and values, and what the drafters keep of it, are copied into the row.
All but its last token count as the prompt; the last one is the root of the row's next round:

    prompt     x0 x1 x2 x3
    prefill    x0 x1 x2          cached at positions 0, 1, 2
    root                x3       at position 3, whose round emits x4, …

A batch of another size, with more rows for more prompts, or fewer where most have ended, starts
with the texts so far as its prompts. Texts are those of `generate`, since a row decodes alike in
any batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads import DecodingError, Sampling
from headstart.heads.core import (
    brief,
    current,
    in_steps,
    note_rows,
    processors_by_row,
    write_rows,
)

from .loop import Decoding
from .prompts import Manner, Piece, Prompt
from .request import Capacity, Request
from .row_states import adopt_rows, clear_caches
from .rows import Rows
from .rules.registry import choose_rule
from .speculator import Speculator
from .stats import Emitted, Stats
from .trees.policy import Committed

_TOGETHER = 16  # prompts that are run at once, which bounds the memory that they need meanwhile
_FEW = 4  # a batch gets smaller once one row in so many is left


@dataclass(eq=False)
class _Running:
    """A prompt that is being decoded, and its text so far."""

    prompt: Prompt
    text: list[int] = field(default_factory=list)
    kept_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.text]

    @property
    def new_tokens(self) -> int:
        """So many may follow."""
        return self.prompt.new_tokens - len(self.text)


class Stream:
    """Prompts that are decoded together, and as many more as rows are free.

    A prompt whose scores are no distribution ends by itself, with an error. Where memory is not
    enough, the batch starts anew with half of the rows, and says so in a warning; prompts without a
    row wait. Only one that needs too much even alone ends with an error.

    Args:
        limit: rows at once, at most. The batch has fewer while it needs no more than these.
        longest: tokens of a prompt and its text, at most, where that is known beforehand. The batch
            starts anew where a prompt needs more.
    """

    def __init__(self, speculator: Speculator, manner: Manner, limit: int, longest: int = 0):
        self.speculator, self.manner, self.limit = speculator, manner, limit
        self.longest = longest
        self._rows: list[_Running | None] = []
        self._waiting: list[_Running] = []  # for a row
        self._heat = 0.0  # the temperature that the tree is chosen for
        self._apart = frozenset[str]()  # the settings that rows can have, see `RowSettings.apart`
        self._spoilt = False  # whether the cache holds what is no number
        self._gave_up_kept = False
        self._pieces: list[Piece] = []  # that no round has returned yet

    @property
    def active(self) -> int:
        """How many prompts are being decoded, or wait for a row."""
        return len(self._going)

    @property
    def ended(self) -> bool:
        """Whether no prompt is left, and `round` has returned all that was written."""
        return not self._going and not self._pieces

    @property
    def _going(self) -> list[_Running]:
        return [running for running in self._rows if running is not None] + self._waiting

    @property
    def room(self) -> int:
        """How many more can be."""
        return max(self.limit - self.active, 0)

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, prompts: Sequence[Prompt]) -> None:
        """Begin to decode prompts, no more than there is room for."""
        if prompts:
            self._within_memory(self._settle)
            self._waiting += [_Running(prompt) for prompt in prompts]
            self._within_memory(self._place)

    @torch.inference_mode(False)
    @torch.no_grad()
    def round(self) -> list[Piece]:
        """One round, for the prompts that are being decoded; what it wrote of each."""
        self._within_memory(self._round)
        found, self._pieces = self._pieces, []
        return found

    def _round(self) -> None:
        free = self._rows.count(None)
        few = len(self._rows) >= _FEW * self.active
        if few or self._spoilt or (self._waiting and free):
            self._settle()
            self._place()
        if self.active:
            self._add(self.decoding.round())

    @torch.inference_mode(False)
    @torch.no_grad()
    def stop(self, prompts: Sequence[Prompt]) -> None:
        """Write no more of prompts; what `round` still returns of them is nobody's."""
        self._within_memory(self._settle)
        keys = {id(prompt) for prompt in prompts}
        self._waiting = [own for own in self._waiting if id(own.prompt) not in keys]
        rows = [n for n, own in enumerate(self._rows) if own and id(own.prompt) in keys]
        if not rows:
            return
        for row in rows:
            if (running := self._rows[row]) is not None:
                self.request.target.keep_row(row, running.tokens)
            self._rows[row] = None
        self.request.rows.end(rows)
        with current(self.request.device):
            self.decoding.runner.restore_ended_rows(np.zeros(len(self._rows), dtype=int))

    def _settle(self) -> None:
        """End the rounds that have started."""
        for emitted in self.decoding.settle() if self._rows else ():
            self._add(emitted)

    def _add(self, emitted: Emitted) -> None:
        left, faults = self.request.rows.remaining, self.decoding.faults or {}
        for row in np.flatnonzero(emitted.count).tolist():
            running, only = self._rows[row], slice(row, row + 1)
            assert running is not None
            if row in faults:
                self._rows[row], self._spoilt = None, True
                self._fail(running, faults[row](0, len(running.text) + int(emitted.count[row])))
                continue
            drafter = None if emitted.drafter is None else emitted.drafter[only]
            own = Emitted(emitted.count[only], emitted.nodes[only], emitted.tokens[only], drafter)
            own.drafted = emitted.drafted
            if emitted.logprobs is not None and (most := running.prompt.logprobs) is not None:
                own.logprobs = emitted.logprobs.of_row(row, most)
            running.text += emitted.tokens[row, : emitted.count[row]].tolist()
            ended = left[row] == 0
            if ended:
                self.request.target.keep_row(row, running.tokens)
                self._rows[row] = None
                self._remember(running)
            piece = Piece(running.prompt, own, running.text, ended, None, running.kept_tokens)
            self._pieces.append(piece)

    def _remember(self, running: _Running) -> None:
        """Have drafters keep the text, where they do so."""
        drafters = self.speculator.decoding_drafters
        if self.speculator.remembers and drafters.remembers:
            drafters.remember(torch.tensor(running.tokens), len(running.prompt.tokens))

    def _fail(self, running: _Running, error: Exception) -> None:
        self._pieces.append(Piece(running.prompt, None, running.text, True, error))

    def _within_memory(self, work: Callable[[], None]) -> None:
        """Do it, with fewer rows where there is no memory for all of them."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                found = DecodingError(
                    f"no memory to decode this request, even alone: {brief(error)}"
                )
            self._free_memory(found)
            work = self._place

    def _free_memory(self, error: DecodingError) -> None:
        """Let the batch start anew without the texts that are kept; next with half of its rows; of
        a single row, without the longest."""
        rows, self._waiting = len(self._rows), self._going
        self._rows = []
        for name in ("request", "decoding"):
            vars(self).pop(name, None)
        target, self.longest = self.speculator.target, 0
        kept = bool(target.kept) and not self._gave_up_kept
        target.release()
        if self.speculator.graphs is not None:
            self.speculator.graphs.release()
        if kept:
            self._gave_up_kept = True
        elif rows > 1:
            self.limit = rows // 2
            warnings.warn(
                f"there was no memory to decode {rows} requests together; from now on at most "
                f"{self.limit} are, until these have ended.",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self._waiting:
            largest = max(self._waiting, key=lambda own: own.prompt.longest)
            self._waiting.remove(largest)
            self._fail(largest, error)

    def _place(self) -> None:
        """Give rows to those that wait, in a batch that starts anew if they do not fit this one."""
        going, size = self._going, len(self._rows)
        if not going:
            self._rows = []
            return
        longest = max(own.prompt.longest for own in going)
        # Powers of two, so that batches seldom start anew, and since rounds of each number of rows
        # are captured by themselves.
        batch = min(self.limit, _power_of_two(len(going)))
        fits = longest <= self.longest and batch <= size < _FEW * len(going)
        heat = self._temperature(going)
        # What was needed once may be again, and to start anew costs more than to have it.
        apart = self._apart.union(*(own.prompt.settings.apart for own in going))
        lacks = (heat and not self._heat) or apart != self._apart
        if not fits or self._spoilt or lacks:
            self.longest = self.longest if longest <= self.longest else _power_of_two(longest)
            self._rows, self._waiting = [None] * batch, going
            self._heat, self._apart, self._spoilt = heat, apart, False
            with current(self.speculator.device):
                self._make_request(batch)
        with current(self.speculator.device):
            self._fill()

    def _temperature(self, running: Sequence[_Running]) -> float:
        """The temperature to choose a tree for; 0 where all are decoded greedily."""
        if self.manner.processors is not None:
            return self.manner.temperature
        return sum(own.prompt.settings.temperature for own in running) / len(running)

    def _make_request(self, batch: int) -> None:
        """Make a request whose rows have all ended, at position 0."""
        speculator, manner, heat = self.speculator, self.manner, self._heat
        target, device = speculator.target, speculator.device
        rule = choose_rule(speculator.rule, heat > 0)
        seeds = torch.zeros(batch, dtype=torch.long, device=device) if heat else None
        vocabulary = target.vocabulary
        processors = manner.processors
        if processors is None:
            processors = processors_by_row(
                batch, device, self._apart, heat > 0, vocabulary, manner.eos
            )
        self.request = request = Request(
            target, speculator.decoding_drafters, speculator.tree_of(batch, heat),
            Sampling(seeds, processors), rule=rule,
            expansion=speculator.expansion if rule.samples else rule.children, eos=manner.eos,
            times=speculator.times_of(batch, heat),
        )  # fmt: skip
        rule.check_sampling(request.sampling)
        self.decoding, self._begun = Decoding(request, speculator.graphs), False
        runner = self.decoding.runner
        first = runner.first_tokens(batch, 1, self.longest)
        behind = runner.slots_ahead + request.policy.nodes
        request.capacity = Capacity(1, self.longest, behind, first)
        capacity = in_steps(request.capacity.slots)
        target.resize(batch, capacity)
        context = None if target.limit is None else target.limit.positions
        pads = np.zeros(batch, dtype=int)
        request.rows = Rows(pads, 1, 0, request.eos, vocabulary, context, False)
        ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        request.start_text(ids, pads, vocabulary)
        request.states = runner.start(batch, request.capacity.most)
        clear_caches(request.states)
        zeros, none = torch.zeros_like(ids[:, 0]), torch.empty(batch, 1, 0, device=device)
        request.committed = Committed(none, ids, zeros, zeros)

    def _fill(self) -> None:
        """Give free rows to those that wait."""
        free = [row for row, running in enumerate(self._rows) if running is None]
        new = self._waiting[: len(free)]
        for first in range(0, len(new), _TOGETHER):
            some = new[first : first + _TOGETHER]
            rows = free[first : first + len(some)]
            del self._waiting[: len(some)]
            for row, running in zip(rows, some, strict=True):
                self._rows[row] = running
            self._run_prompts(rows, some)
        if not new:
            return
        every = [own.prompt for own in self._rows if own is not None]
        note_rows(self.request.sampling.processors or (), [each.settings for each in every])
        told = [each.logprobs for each in every if each.logprobs is not None]
        # A power of two, since rounds of each number are captured by themselves.
        vocabulary = self.request.target.vocabulary
        self.request.logprobs = min(_power_of_two(max(told)), vocabulary) if told else None
        if self._begun:
            self.decoding.runner.refill()
        else:
            self.decoding.runner.begin()
            self._begun = True
        self.decoding.faults = {}
        # A stream may go on for days; nobody reads these.
        self.decoding.stats = Stats(self.request.policy.max_depth)

    def _run_prompts(self, rows: list[int], new: Sequence[_Running]) -> None:
        request, target = self.request, self.request.target
        ids = [torch.tensor(running.tokens) for running in new]
        roots = [len(each) - 1 for each in ids]  # their positions
        tokens = pad_sequence(ids, batch_first=True).to(target.device)  # [R, T]
        where = torch.tensor(rows, device=target.device)  # [R]
        position = torch.tensor(roots, device=target.device)
        # A prompt of one token is run, too: as the root it is written to the same slot again, and
        # drafters, which see it twice, only propose less well.
        counts = [max(root, 1) for root in roots]
        before = tokens[:, : max(counts)]
        count = torch.tensor(counts, device=target.device)
        cached, features = target.prefill_apart(before, counts, roots)
        for running in new:
            running.kept_tokens = target.kept_tokens
        request.rows.refill(rows, roots, [running.new_tokens for running in new])
        request.make_space(request.rows.longest)
        target.adopt(cached, where, max(counts))
        if request.drafters.members:
            states = request.drafters.start(len(rows), request.capacity.most)
            request.drafters.prefill(states, features, before, count)
            adopt_rows(request.states, states, where, max(counts), len(self._rows))
        if request.sampling.seeds is not None:
            seeds = torch.tensor([each.prompt.seed for each in new], device=target.device)
            request.sampling.seeds.index_copy_(0, where, seeds)
        if self.manner.processors is None:
            settings = [running.prompt.settings for running in new]
            write_rows(request.sampling.processors or (), where, settings)
        request.refill_text(where, tokens, position + 1)
        last = features.gather(1, (count - 1).view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        root = tokens.gather(1, position.unsqueeze(1))
        self._commit(where, last, root, position)

    def _commit(self, rows: Tensor, features: Tensor, root: Tensor, position: Tensor) -> None:
        """Let rows [R] begin the next round with a root [R, 1], after features [R, 1, F]."""
        for each in self.request.unseen:
            each.count = each.count.index_fill(0, rows, 0)
        old = self.request.committed
        width = old.tokens.shape[1]
        if old.features.shape[-1] != features.shape[-1]:
            sizes = *old.features.shape[:2], features.shape[-1]
            old = replace(old, features=features.new_zeros(sizes))
        self.request.committed = Committed(
            old.features.index_copy(0, rows, features.expand(-1, width, -1)),
            old.tokens.index_copy(0, rows, root.expand(-1, width)),
            old.count.index_fill(0, rows, 1),
            old.lengths.index_copy(0, rows, position),
        )


def _power_of_two(number: int) -> int:
    """The smallest one that is no less; 0 for 0.

    >>> [_power_of_two(n) for n in (0, 1, 2, 3, 9)]
    [0, 1, 2, 4, 16]
    """
    return 1 << (number - 1).bit_length() if number else 0
