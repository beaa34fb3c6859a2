"""Who runs the rounds of a request: as they are written, or captured as graphs and replayed."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from headstart.heads import Sampling
from headstart.heads.core import Biased, in_steps
from headstart.heads.core.before import Unended
from headstart.heads.core.sampling import NUMBERS, Suppressed, read_on_device

from .depth import PLAIN_ROUNDS
from .graphs import RoundGraphs, addresses
from .request import FIRST_TOKENS, Request, first_tokens
from .round import ProposalCheck, run_round
from .trees.policy import Committed, Policy


class EagerRunner:
    """Runs rounds as they are written, and reads each one's report before the next one starts."""

    holds_ended_rows = False  # whether rounds leave rows that have ended where they are
    drafts_always = False  # whether no round of an adaptive tree is plain

    def __init__(self, request: Request):
        self.request, self._rounds = request, 0
        # Slots that are written behind a root beside the tree's: after plain rounds, drafters take
        # in what these have committed.
        self.slots_ahead = PLAIN_ROUNDS if request.times is not None else 0

    def start(self, batch: int, capacity: int) -> list[Any]:
        """The drafters' states for prompts that are about to be run, of at most so many slots."""
        return self.request.drafters.start(batch, capacity)

    def first_tokens(self, batch: int, prompt: int, new_tokens: int) -> int:
        """How many tokens there is space for at first, of at most so many."""
        return FIRST_TOKENS

    def begin(self) -> None:
        """Take over after the prefill."""

    def refill(self) -> None:
        """Take over after rows were given other prompts; no round may be under way."""

    def settle(self) -> Iterator[tuple[np.ndarray, Policy]]:
        """The reports of rounds that have started; none starts meanwhile."""
        yield from ()

    def next_report(self) -> tuple[np.ndarray, Policy]:
        """The report of the round that started first, and what grew its tree."""
        request, longest = self.request, self.request.rows.longest
        request.make_space(longest)
        check = None
        if request.drafters.members and (self._rounds < 16 or self._rounds % 8 == 0):
            check = ProposalCheck(request.drafters)
        self._rounds += 1
        request.drafters.reserve(request.states, longest, request.capacity.behind)
        policy = request.next_policy()
        even = request.rows.even
        request.committed, packed = run_round(request, policy, longest, even, check)
        return packed.cpu().numpy(), policy

    def restore_ended_rows(self, count: np.ndarray) -> None:
        """See `Request.restore_ended_rows`; `count` [B] tokens were emitted last."""
        self.request.restore_ended_rows(count)


class CapturedRunner:
    """Captures rounds and replays them; while the host reads one report, the next round may run.

    The calls are those of `EagerRunner`, for a request whose text nobody reads.
    """

    holds_ended_rows = True
    drafts_always = True

    def __init__(self, request: Request, graphs: RoundGraphs):
        self.request, self.graphs = request, graphs
        # Of rounds that start before it is known where their row ends.
        self.slots_ahead = 2 * (request.policy.max_depth + 1)
        self._started: deque[tuple[Callable[[], np.ndarray], Policy]] = deque()

    def start(self, batch: int, capacity: int) -> list[Any]:
        return self.graphs.states(self.request.drafters, batch, capacity)

    def first_tokens(self, batch: int, prompt: int, new_tokens: int) -> int:
        return first_tokens(self.request.target.cache, batch, prompt, new_tokens)

    def begin(self) -> None:
        # All that rounds read is put where it stays.
        request, keep = self.request, self.graphs.keep
        seeds = request.sampling.seeds
        seeds = None if seeds is None else keep("seeds", seeds)
        device, vocabulary = request.lengths.device, len(request.rows.special) - 1
        processors = read_on_device(request.sampling.processors, vocabulary, device, keep)
        request.set_sampling(replace(request.sampling, seeds=seeds, processors=processors))
        # As much as the target's cache has, so that both grow together.
        most = request.target.cache.capacity - request.policy.nodes
        request.drafters.reserve(request.states, most, request.capacity.behind)
        request.offset = keep("offset", request.offset)
        for name in ("ends", "seen"):
            if (value := getattr(request.text, name)) is not None:
                setattr(request.text, name, keep(name, value))
        request.committed = self._widened(request.committed)
        self.refill()

    def refill(self) -> None:
        self._settings = built_in(self.request.sampling)
        alive = torch.from_numpy(self.request.rows.remaining > 0)
        self._keep_rows(alive.to(self.request.lengths))

    def settle(self) -> Iterator[tuple[np.ndarray, Policy]]:
        while self._started:
            read, policy = self._started.popleft()
            yield read(), policy

    def next_report(self) -> tuple[np.ndarray, Policy]:
        started = self._started
        if not started:
            self._start_round()
        # No further round starts where a row will have used its budget by then.
        if self.request.rows.free > started[0][1].max_depth + 1:
            self._start_round()
        read, policy = started.popleft()
        return read(), policy

    def restore_ended_rows(self, count: np.ndarray) -> None:
        # A round that has started has handed those tokens on already.
        count = np.zeros_like(count) if self._started else count
        self._keep_rows(self.request.restore_ended_rows(count))

    def _start_round(self) -> None:
        request = self.request
        longest = request.rows.longest + sum(each.max_depth + 1 for _, each in self._started)
        request.make_space(longest)
        policy = request.next_policy()
        report = self.graphs.send(self._run_round(policy, self._bound(longest)))
        self._started.append((report, policy))

    def _bound(self, longest: int) -> int:
        """A bound on the roots' positions that is the same for many rounds, as graphs have it."""
        request = self.request
        most = request.target.cache.capacity - request.policy.nodes
        # Tree attention reads lengths on the device: one graph serves all, where drafters let it.
        if request.target.windows.tree and not request.drafters.needs_length_bound:
            return most
        return min(bucket(longest + self.slots_ahead), most)

    def _run_round(self, policy: Policy, longest: int) -> Tensor:
        """Do a round on tensors that stay, perhaps by replaying it; returns its report."""
        request, graphs = self.request, self.graphs
        request.drafters.reserve(request.states, longest, request.capacity.behind)
        graphs.keep_states(request.states)
        text = request.text
        if request.keeps_text:
            text.ids = graphs.keep("ids", text.ids)
        weight = request.target.model.get_input_embeddings().weight  # another one after a move
        kind = (
            *(policy, request.drafters.drafters, request.rule, request.expansion),
            *(self._settings, request.committed.tokens.shape, longest, text.ends is None),
            *(request.keeps_text and text.ids.shape, request.logprobs),
            addresses(request.target.cache, request.states, weight),
        )
        check = ProposalCheck(request.drafters) if request.drafters.members else None

        def work() -> tuple[Committed, Tensor]:
            committed, report = run_round(request, policy, longest, False, check)
            graphs.keep_states(request.states)
            return self._kept(self._widened(committed)), report

        request.committed, report = graphs.run(kind, work)
        return report

    def _widened(self, committed: Committed) -> Committed:
        """As wide as what rounds of the deepest tree leave, so that one kind can follow another."""
        steps = self.request.policy.max_depth + 1 - committed.tokens.shape[1]
        if not steps:
            return committed
        return replace(
            committed,
            features=_repeat_last(committed.features, steps),
            tokens=_repeat_last(committed.tokens, steps),
        )

    def _kept(self, committed: Committed) -> Committed:
        keep = self.graphs.keep
        return Committed(*(keep(f.name, getattr(committed, f.name)) for f in fields(committed)))

    def _keep_rows(self, alive: Tensor) -> None:
        request = self.request
        request.committed = self._kept(request.committed)
        request.alive = self.graphs.keep("alive", alive)


def _repeat_last(value: Tensor, times: int) -> Tensor:
    """[B, A, …], after whose last column that column stands so many times again."""
    return torch.cat([value, *[value[:, -1:]] * times], 1)


def bucket(slots: int) -> int:
    """So many slots, rounded up by a quarter at most: a text as it grows needs few graphs.

    >>> [bucket(n) for n in (1, 64, 65, 300, 513, 2049)]
    [64, 64, 128, 320, 640, 2560]
    """
    step = in_steps(1)
    while slots > 8 * step:
        step *= 2
    return -(-slots // step) * step


def built_in(sampling: Sampling) -> Hashable:
    """All that a graph has built in of how tokens are chosen."""

    def options(item: LogitsProcessor) -> Hashable:
        if type(item) is Suppressed or type(item) is hf.SuppressTokensLogitsProcessor:
            return Suppressed
        if type(item) is Biased:
            return Biased, len(item.bias)
        if type(item) is Unended:
            return Unended, len(item.ends)
        if (penalty := sampling.penalty) is not None and item is penalty:
            return type(item)  # what it ignores is on the device, and so is what it is
        return settings_of(item, NUMBERS.get(type(item)))

    processors = tuple(map(options, sampling.processors or ()))
    return sampling.seeds is None, sampling.dtype, processors


def settings_of(item: LogitsProcessor, without: str | None = None) -> Hashable:
    """A processor's class and its attributes, but for one: those of alike ones are equal."""

    def plain(value: Any) -> Hashable:
        return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value)

    found = {name: value for name, value in vars(item).items() if name != without}
    return type(item), *((name, plain(value)) for name, value in sorted(found.items()))
