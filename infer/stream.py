"""Continuous batching: prompts decoded in a batch whose rows are filled anew as they end.

A row that has ended is given the next prompt: that is run by itself, in a small batch with others
that begin now, and its keys and values, and what the drafters keep of it, are copied into the row.
All but its last token count as the prompt; the last one is the root of the row's next round:

    prompt     x0 x1 x2 x3
    prefill    x0 x1 x2          cached at positions 0, 1, 2
    root                x3       at position 3, whose round emits x4, …

Texts are those of `generate`, since a row decodes alike in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from headstart.heads import OptionError, Sampling, SlabCache
from headstart.heads.core import current, in_steps

from .loop import Decoding
from .request import Capacity, Request
from .rows import Rows
from .rules.registry import choose_rule
from .speculator import Speculator
from .stats import Emitted
from .trees.policy import Committed

_SHARE = 8  # rows are filled anew when one in so many is free
_TOGETHER = 16  # prompts that are run at once, which bounds the memory that they need meanwhile


@dataclass(frozen=True)
class Prompt:
    """A prompt of a stream.

    Attributes:
        key: the caller's own.
        tokens: [P] ids.
        new_tokens: at most so many are written.
        seed: of its noise, where the stream samples.
    """

    key: Any
    tokens: Sequence[int]
    new_tokens: int
    seed: int = 0


def decode_stream(
    speculator: Speculator,
    next_prompt: Callable[[], Prompt | None],
    batch: int,
    longest: int,
    temperature: float = 0.0,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Decode prompts as rows become free; yields each with what was written, as they end.

    The speculator must not decode anything else until the end.

    Args:
        next_prompt: asked when rows are free; None where there is no prompt now. What is yielded
            may lead to further prompts.
        batch: rows at once, at most.
        longest: tokens of a prompt and its text, at most.
        temperature: 0 writes greedily; others sample from the target's whole distribution.

    Raises:
        OptionError: a prompt is empty, or too long.
    """
    while first := _take(next_prompt, batch):
        stream = _Stream(speculator, len(first), longest, temperature)
        stream.fill(first)
        while stream.active:
            yield from stream.round()
            free = len(stream.free)
            # A few at a time, so that prompts rarely run alone.
            if free >= max(1, len(first) // _SHARE) or not stream.active:
                stream.fill(_take(next_prompt, free))


def _take(next_prompt: Callable[[], Prompt | None], count: int) -> list[Prompt]:
    found: list[Prompt] = []
    while len(found) < count and (prompt := next_prompt()) is not None:
        found.append(prompt)
    return found


class _Stream:
    """A request of B rows, each with a prompt of its own or none.

    Attributes:
        free: the rows without a prompt.
    """

    def __init__(self, speculator: Speculator, batch: int, longest: int, temperature: float):
        config: Any = speculator.model.generation_config
        eos = torch.as_tensor([] if config.eos_token_id is None else config.eos_token_id)
        rule, device = choose_rule(speculator.rule, temperature > 0), speculator.device
        processors = LogitsProcessorList()
        if temperature not in (0.0, 1.0):
            processors.append(TemperatureLogitsWarper(temperature))
        seeds = torch.zeros(batch, dtype=torch.long, device=device) if temperature else None
        self.request = Request(
            speculator.target, speculator.drafters, speculator.tree_of(batch, temperature),
            Sampling(seeds, processors), rule=rule,
            expansion=speculator.expansion if rule.samples else rule.children,
            eos=eos.flatten().tolist(),
        )  # fmt: skip
        rule.check_sampling(self.request.sampling)
        self.decoding, self.longest = Decoding(self.request, speculator.graphs), longest
        self.prompts: list[Prompt | None] = [None] * batch
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.free, self._begun = list(range(batch)), False
        self._start(batch)

    def _start(self, batch: int) -> None:
        """Make a request whose rows have all ended, at position 0."""
        request, target, runner = self.request, self.request.target, self.decoding.runner
        first = runner.first_tokens(batch, 1, self.longest)
        behind = runner.slots_ahead + request.policy.nodes
        request.capacity = Capacity(1, self.longest, behind, first)
        capacity = in_steps(request.capacity.slots)
        target.cache.resize(batch, capacity)
        embedding: Any = target.model.get_input_embeddings()
        config = target.model.config.get_text_config()
        vocabulary = max(embedding.weight.shape[0], config.vocab_size)
        context = None if target.limit is None else target.limit.positions
        pads = np.zeros(batch, dtype=int)
        request.rows = Rows(pads, 1, 0, request.eos, vocabulary, context, False)
        ids = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
        request.start_text(ids, pads, vocabulary)
        request.states = runner.start(batch, request.capacity.most)
        zeros, none = torch.zeros_like(ids[:, 0]), torch.empty(batch, 1, 0, device=target.device)
        request.committed = Committed(none, ids, zeros, ids, zeros)

    @property
    def active(self) -> bool:
        """Whether a row has a prompt."""
        return len(self.free) < len(self.prompts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def round(self) -> list[tuple[Prompt, list[int]]]:
        """One round; the prompts that ended in it, with what was written."""
        self._add(self.decoding.round())
        return self._ended()

    def _add(self, emitted: Emitted) -> None:
        for row in np.flatnonzero(emitted.count):
            self.texts[row] += emitted.tokens[row, : emitted.count[row]].tolist()

    def _ended(self) -> list[tuple[Prompt, list[int]]]:
        found = []
        for row in np.flatnonzero(self.request.rows.remaining == 0).tolist():
            prompt = self.prompts[row]
            if prompt is not None:
                found.append((prompt, self.texts[row]))
                self.prompts[row], self.texts[row] = None, []
                self.free.append(row)
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self, prompts: Sequence[Prompt]) -> None:
        """Give prompts to free rows."""
        with current(self.request.device):
            self._fill(prompts)

    def _fill(self, prompts: Sequence[Prompt]) -> None:
        for emitted in self.decoding.settle():  # those rows have ended in it, too
            self._add(emitted)
        for first in range(0, len(prompts), _TOGETHER):
            some = prompts[first : first + _TOGETHER]
            rows, self.free = self.free[: len(some)], self.free[len(some) :]
            for row, prompt in zip(rows, some, strict=True):
                self.prompts[row] = prompt
            self._run_prompts(rows, some)
        if not prompts:
            return
        if self._begun:
            self.decoding.runner.refill()
        else:
            self.decoding.runner.begin()
            self._begun = True

    def _run_prompts(self, rows: list[int], prompts: Sequence[Prompt]) -> None:
        request, target = self.request, self.request.target
        roots = [len(prompt.tokens) - 1 for prompt in prompts]  # their positions
        self._check(prompts)
        ids = [torch.tensor(prompt.tokens) for prompt in prompts]
        tokens = pad_sequence(ids, batch_first=True).to(target.device)  # [R, T]
        where = torch.tensor(rows, device=target.device)  # [R]
        position = torch.tensor(roots, device=target.device)
        # A prompt of one token is run, too: as the root it is written to the same slot again, and
        # drafters, which see it twice, only propose less well.
        counts = [max(root, 1) for root in roots]
        before = tokens[:, : max(counts)]
        count = torch.tensor(counts, device=target.device)
        cached, features = target.prefill_apart(before, counts, roots)
        request.rows.refill(rows, roots, [prompt.new_tokens for prompt in prompts])
        request.make_space(request.rows.longest)
        target.cache.adopt(cached, where, max(counts))
        if request.drafters.members:
            states = request.drafters.start(len(rows), request.capacity.most)
            request.drafters.prefill(states, features, before, count)
            adopt_rows(request.states, states, where, max(counts), len(self.prompts))
        if request.sampling.seeds is not None:
            seeds = torch.tensor([prompt.seed for prompt in prompts], device=target.device)
            request.sampling.seeds.index_copy_(0, where, seeds)
        last = features.gather(1, (count - 1).view(-1, 1, 1).expand(-1, 1, features.shape[-1]))
        root = tokens.gather(1, position.unsqueeze(1))
        self._commit(where, last, root, position)

    def _commit(self, rows: Tensor, features: Tensor, root: Tensor, position: Tensor) -> None:
        """Let rows [R] begin the next round with a root [R, 1], after features [R, 1, F]."""
        old = self.request.committed
        width = old.tokens.shape[1]
        if old.features.shape[-1] != features.shape[-1]:
            sizes = *old.features.shape[:2], features.shape[-1]
            old = replace(old, features=features.new_zeros(sizes))
        self.request.committed = Committed(
            old.features.index_copy(0, rows, features.expand(-1, width, -1)),
            old.tokens.index_copy(0, rows, root.expand(-1, width)),
            old.count.index_fill(0, rows, 1),
            old.root.index_copy(0, rows, root),
            old.lengths.index_copy(0, rows, position),
        )

    def _check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            length = len(prompt.tokens)
            if length < 1 or prompt.new_tokens < 1 or length + prompt.new_tokens > self.longest:
                raise OptionError(
                    f"found a prompt of {length} tokens and {prompt.new_tokens} new ones; expected "
                    f"at least 1 of each, and at most {self.longest} in all."
                )


def adopt_rows(own: Any, other: Any, rows: Tensor, slots: int, batch: int) -> None:
    """Put what states of drafters hold of new prompts into rows [R] of states of `batch` rows.

    Args:
        other: states that have seen their prompts, and no round yet: tensors and slab caches with a
            row for each text, as attributes, or attributes of those.
        slots: of caches that hold something.
    """
    if isinstance(other, list):
        for mine, theirs in zip(own, other, strict=True):
            adopt_rows(mine, theirs, rows, slots, batch)
        return
    for name, value in vars(other).items() if hasattr(other, "__dict__") else ():
        mine = getattr(own, name, None)
        if isinstance(value, SlabCache):
            assert mine is not None
            mine.adopt(value, rows, slots)
        elif isinstance(value, Tensor):
            setattr(own, name, _with_rows(mine, value, rows, batch))
        elif mine is not None:
            adopt_rows(mine, value, rows, slots, batch)


def _with_rows(own: Tensor | None, other: Tensor, rows: Tensor, batch: int) -> Tensor:
    """`own` [B, …] with rows [R] replaced; it is as wide as the wider of the two."""
    if own is None:
        own = other.new_zeros(batch, *other.shape[1:])
    if other.dim() == 1:
        return own.index_copy(0, rows, other)
    width = other.shape[1]
    if own.shape[1] < width:
        own = torch.cat([own, own.new_zeros(batch, width - own.shape[1], *own.shape[2:])], 1)
    own = own.clone()
    own[rows, :width] = other
    return own
