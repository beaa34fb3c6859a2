"""From logits to distributions and draws, the same for target and drafter.

Randomness is a counter, never a generator: the noise of a token depends only on (row seed, absolute
position, token id), so a row decodes alike alone, in any batch, and with any tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""The processors that a drafter's proposals follow too: functions of one row of logits alone."""

ROWWISE = (
    *WARPERS,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    TopHLogitsWarper,
    SuppressTokensLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
)
"""All processors of transformers that are functions of one row of logits alone."""

STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Processors that count on one call for each token of the text, in order, for the whole batch."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX = (-4658895280553007687, -7723592293110705685)  # its two multipliers


def _splitmix(state: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014) on int64, whose product wraps."""
    for shift, multiplier in zip((30, 27), _MIX, strict=True):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def row_seeds(seed: int | Sequence[int], batch: int, device: torch.device | str = "cpu") -> Tensor:
    """One seed per row, [B] int64: a list is taken as it is, an int is spread over the rows.

    >>> row_seeds([3, 4], 2).tolist()
    [3, 4]
    """
    if isinstance(seed, int):
        rows = torch.arange(batch, device=device, dtype=torch.int64)
        return _splitmix((seed & (2**62 - 1)) + rows * _GOLDEN)
    return torch.tensor(list(seed), dtype=torch.int64, device=device)


class Stream(IntEnum):
    """Which draw a number is for; streams share no number."""

    TARGET = 0  # the target's own choice of a token, shared with the drafter by `coupled`
    CHILDREN = 1  # the drafter's independent draws of a node's children
    VERDICTS = 2  # accepting a node, and the token drawn at the end of a round


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, keyed by (seed, position, token).

    Args:
        seeds: [B] int64.
        positions: [B, M] int64, the absolute position that the draw decides.
        tokens: [V] int64, token ids.

    Returns:
        [B, M, V] float64.
    """
    row = _splitmix(seeds.unsqueeze(1) + _splitmix(positions + 1) * _GOLDEN)  # [B, M]
    bits = _splitmix(row.unsqueeze(-1) + (tokens + 1) * _GOLDEN)  # [B, M, V]
    # 52 bits and a half: the largest value stays below 1 after rounding, so the noise stays finite.
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [B, M, V]; arguments as for `uniform`.

    The argmax of log p + noise is a draw from p (Gumbel 1954; Maddison et al. 2014).
    """
    return -torch.log(-torch.log(uniform(seeds, positions, tokens)))


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from the target's logits.

    Attributes:
        seeds: [B] int64 for sampling, None for greedy decoding.
        processors: the logits processors of transformers, applied to the target.
        dtype: what scores are processed in; float32 as in `generate`, float64 for proofs.
    """

    seeds: Tensor | None = None
    processors: LogitsProcessorList | None = None
    dtype: torch.dtype = torch.float32

    @cached_property
    def rowwise(self) -> bool:
        """Whether every processor reads one row of logits alone, never the text before it."""
        return all(isinstance(processor, ROWWISE) for processor in self.processors or ())

    @cached_property
    def readers(self) -> tuple[LogitsProcessor, ...]:
        """The processors that may read the text before a row of logits, beside the `penalty`."""
        return tuple(
            processor
            for processor in self.processors or ()
            if not isinstance(processor, ROWWISE) and processor is not self.penalty
        )

    @cached_property
    def penalty(self) -> RepetitionPenaltyLogitsProcessor | None:
        """The repetition penalty, where there is just one: it need not read the text.

        It asks no more than which tokens the text holds, which the device can keep.
        """
        kind = RepetitionPenaltyLogitsProcessor
        found = [processor for processor in self.processors or () if type(processor) is kind]
        return found[0] if len(found) == 1 else None

    @cached_property
    def particular(self) -> bool:
        """Whether a processor may fail, or count, on a text that the target never wrote.

        Those of transformers take any text, but for the ones that call a user's function or keep a
        state; a user's own processor may do anything.
        """
        home = LogitNormalization.__module__
        return any(
            type(processor).__module__ != home
            or isinstance(processor, (*STATEFUL, PrefixConstrainedLogitsProcessor))
            for processor in self.processors or ()
        )

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the row-wise warpers alone, in `dtype`: [..., V] -> [..., V].

        This is what a drafter's proposals get; the target gets all processors.
        """
        kept = [item for item in self.processors or () if isinstance(item, WARPERS)]
        return self._row_by_row(logits, kept)

    def process_each(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Apply every processor to each row of [..., V] by itself, in `dtype`.

        Args:
            seen: [..., V] bool, what a `penalty` is for. No processor may be among the `readers`.
        """
        return self._row_by_row(logits, self.processors or (), seen, copy=True)

    def _row_by_row(
        self,
        logits: Tensor,
        processors: Sequence[LogitsProcessor],
        seen: Tensor | None = None,
        copy: bool = False,
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).to(self.dtype, copy=copy)
        penalty = self.penalty
        for processor in processors:
            if penalty is not None and processor is penalty:
                assert seen is not None
                flat = penalise(flat, seen.reshape(flat.shape), penalty.penalty)
            else:
                flat = processor(None, flat)  # type: ignore[arg-type]
        return flat.view(logits.shape)

    def process(self, prefix: Tensor, logits: Tensor, rows: Sequence[bool] | None = None) -> Tensor:
        """Apply every processor to logits [B, V] after `prefix` [B, T], in `dtype`.

        Args:
            rows: which of the rows hold a true text; a `prefix_allowed_tokens_fn` is asked for
                those alone. All of them when None.
        """
        scores = logits.to(self.dtype, copy=True)  # a user's processor may write into it
        if self.processors is None:
            return scores
        processors = self.processors
        if rows is not None:
            processors = LogitsProcessorList(
                _Asking(item, rows) if isinstance(item, PrefixConstrainedLogitsProcessor) else item
                for item in processors
            )
        return processors(prefix, scores)  # type: ignore[arg-type]

    def choose(self, scores: Tensor, positions: Tensor) -> Tensor:
        """The token chosen after each row of processed scores: [B, M, V], [B, M] -> [B, M].

        Greedy, or the argmax of score + Gumbel noise at the position that the token will have; -1
        where the scores are no distribution.
        """
        if self.seeds is None:
            return argmax(scores)
        best, token = self.perturb(scores, positions).max(-1)
        return token.masked_fill_((best - best).isnan(), -1)  # NaN, or nothing but one infinity

    def perturb(
        self,
        scores: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
        stream: Stream = Stream.TARGET,
    ) -> Tensor:
        """Scores [B, M, V] plus the noise of (seed, position, token), float64.

        Args:
            positions: [B, M] or [B, 1].
            tokens: [V] the token ids that the columns stand for; 0 … V - 1 when None.
        """
        assert self.seeds is not None
        if tokens is None:
            tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores.double() + gumbel(self.seeds, positions, _in_stream(tokens, stream))

    def uniforms(self, positions: Tensor, draws: int, stream: Stream) -> Tensor:
        """`draws` uniforms in (0, 1) for each of the positions: [B, M] -> [B, M, draws] float64."""
        assert self.seeds is not None
        numbers = torch.arange(draws, device=positions.device)
        return uniform(self.seeds, positions, _in_stream(numbers, stream))


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """What the repetition penalty (Keskar et al. 2019, arXiv 1909.05858) makes of scores.

    Args:
        scores: [..., V]; seen: [..., V] bool, the tokens that are penalised.

    >>> scores, seen = torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    >>> penalise(scores, seen, 2.0).tolist()
    [[1.5, -4.0, 1.0]]
    """
    less = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, less, scores)


def place(positions: Tensor, nodes: Tensor) -> Tensor:
    """One key for a position and a node of its tree, in place of a bare position."""
    return positions + ((nodes + 1) << 32)


def _in_stream(numbers: Tensor, stream: Stream) -> Tensor:
    return numbers + (stream << 40) if stream else numbers


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens drawn from distributions by the inverse of their running sum, taken in float64.

    Args:
        probabilities: [..., V], not necessarily normalised.
        uniforms: [..., k] in (0, 1), one for each token.

    Returns:
        [..., k] int64; never a token of probability 0, and -1 where a row holds a NaN, an infinity
        or nothing.

    >>> half = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]])
    >>> draw(half, torch.tensor([[0.2, 0.49, 0.5], [0.2, 0.5, 0.9]])).tolist()
    [[0, 0, 2], [-1, -1, -1]]
    """
    running = probabilities.double().cumsum(-1)
    total = running[..., -1:]
    token = torch.searchsorted(running, uniforms * total, right=True)  # [..., k]
    token = token.clamp_(max=probabilities.shape[-1] - 1)
    # A uniform at the very end, or a running sum added up in another order, may miss by one token.
    missed = probabilities.gather(-1, token) <= 0
    token = torch.where(missed, probabilities.argmax(-1, keepdim=True), token)
    return token.masked_fill_(~((total > 0) & (total < torch.inf)), -1)


def argmax(scores: Tensor) -> Tensor:
    """The best token of each row, [..., V] -> [...], and -1 where a row holds a NaN.

    >>> argmax(torch.tensor([[1.0, 3.0, 2.0], [9.0, float("nan"), 2.0]])).tolist()
    [1, -1]
    """
    best, token = scores.max(-1)
    return token.masked_fill_(best.isnan(), -1)


class _Asking(LogitsProcessor):
    """A user's `prefix_allowed_tokens_fn`, asked about some rows alone; the others may do all."""

    def __init__(self, asked: PrefixConstrainedLogitsProcessor, rows: Sequence[bool]):
        self.function, self.rows = asked._prefix_allowed_tokens_fn, rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        everything = list(range(scores.shape[-1]))

        def allowed(row: int, text: Tensor) -> list[int]:
            return self.function(row, text) if self.rows[row] else everything

        return PrefixConstrainedLogitsProcessor(allowed, 1)(input_ids, scores)  # type: ignore[arg-type]
