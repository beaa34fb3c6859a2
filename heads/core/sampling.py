"""From logits to scores, distributions and tokens, the same for target and drafter."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from .before import LENGTHS, OF_TEXT, Before, CountPenalty, NGramsByRow, Unended, least_of, penalise
from .best import best_of
from .cpu_choices import best_tokens, with_noise
from .forms import FormsByRow
from .noise import Stream, add_noise, best_with_noise, uniform
from .nucleus import warped
from .row_settings import Biased, EachRow

WARPERS = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    EachRow,
)  # fmt: skip
"""The processors that a drafter's proposals follow too: functions of one row of logits alone.

A class is meant by its exact type, here and in `ROWWISE`: what a subclass reads is not known.
"""


class Suppressed(LogitsProcessor):
    """`SuppressTokensLogitsProcessor` by a mask [V], at the same cost for any number of tokens.

    Its list is sorted for every row once it is longer than some fifty tokens.
    """

    def __init__(self, mask: Tensor):
        self.mask = mask

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores.masked_fill(self.mask, -torch.inf)


ROWWISE = (
    *WARPERS, hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper,
    hf.TopHLogitsWarper, hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization, Suppressed, Biased,
)  # fmt: skip
"""All processors of transformers that are functions of one row of logits alone."""

NUMBERS: dict[type, str] = {
    hf.TemperatureLogitsWarper: "temperature", hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p", hf.RepetitionPenaltyLogitsProcessor: "penalty",
    EachRow: "numbers", NGramsByRow: "ngram_size", Unended: "least", Biased: "bias",
    CountPenalty: "numbers",
}  # fmt: skip
"""The numbers of processors that may as well lie on the device, by the class."""

STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor,
)  # fmt: skip
"""Those that count on one call for each token of the text, in order, for the whole batch."""


def read_on_device(
    processors: LogitsProcessorList | None,
    vocabulary: int,
    device: torch.device,
    keep: Callable[[Hashable, Tensor], Tensor],
) -> LogitsProcessorList | None:
    """The same processors with their numbers in tensors, so that a graph serves all of them.

    Args:
        vocabulary: V.
        keep: puts a tensor where it stays, by a name.
    """
    if processors is None:
        return None
    found = LogitsProcessorList()
    for place, item in enumerate(processors):
        name = NUMBERS.get(type(item))
        if name is not None:
            item = copy.copy(item)
            number = torch.as_tensor(getattr(item, name), dtype=torch.float64, device=device)
            setattr(item, name, keep((place, name), number))
        elif type(item) in LENGTHS:
            own: Any = item
            least = torch.full((1, 1), least_of(own), device=device)
            ends = own.eos_token_id.to(device)
            item = Unended(keep((place, "least"), least), keep((place, "ends"), ends))
        elif type(item) is hf.SuppressTokensLogitsProcessor:
            tokens = item.suppress_tokens.to(device)
            mask = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            known = tokens[(tokens >= 0) & (tokens < vocabulary)]
            item = Suppressed(keep((place, "suppressed"), mask.index_fill_(0, known, True)))
        found.append(item)
    return found


_NOTHING = Before()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from the target's logits.

    Attributes:
        seeds: [B] int64 for sampling, None for greedy decoding.
        processors: the logits processors of transformers, applied to the target.
        dtype: what scores are processed in; float32 as in `generate`, float64 for proofs.
        kernels: whether `cpu_choices` chooses on a CPU, as where the target runs by its kernels.
    """

    seeds: Tensor | None = None
    processors: LogitsProcessorList | None = None
    dtype: torch.dtype = torch.float32
    kernels: bool = False

    @cached_property
    def rowwise(self) -> bool:
        """Whether every processor reads one row of logits alone, never the text before it."""
        return all(type(processor) in ROWWISE for processor in self.processors or ())

    @cached_property
    def readers(self) -> tuple[LogitsProcessor, ...]:
        """The processors that are shown the text so far, without the `penalty` and `OF_TEXT`."""
        others = (item for item in self.processors or () if type(item) not in ROWWISE)
        return tuple(
            item for item in others if item is not self.penalty and type(item) not in OF_TEXT
        )

    @cached_property
    def of_text(self) -> bool:
        """Whether `OF_TEXT` has some of the processors, and nobody else reads the text."""
        return not self.readers and any(type(item) in OF_TEXT for item in self.processors or ())

    @cached_property
    def on_host(self) -> bool:
        """Whether the host reads the text, so that no graph can have the round."""
        kinds = {type(item) for item in self.processors or ()}
        return bool(self.readers) or FormsByRow in kinds

    @property
    def forms(self) -> FormsByRow | None:
        """The forms that texts shall have, where a row has one."""
        found = (item for item in self.processors or () if isinstance(item, FormsByRow))
        return next((item for item in found if any(item.forms)), None)

    @cached_property
    def penalty(self) -> hf.RepetitionPenaltyLogitsProcessor | None:
        """The repetition penalty, where there is just one; it reads the set of tokens alone."""
        kind = hf.RepetitionPenaltyLogitsProcessor
        found = [item for item in self.processors or () if type(item) is kind]
        return found[0] if len(found) == 1 else None

    @cached_property
    def particular(self) -> bool:
        """Whether a processor may fail on a text that the target never wrote, or change its state.

        So may a user's own, and those of transformers that call a user's function or keep a state.
        """
        kept = (*STATEFUL, hf.PrefixConstrainedLogitsProcessor)
        return any(
            type(item).__module__ != hf.__name__ or isinstance(item, kept)
            for item in self.processors or ()
            if type(item) not in ROWWISE and type(item) not in OF_TEXT
        )

    @property
    def greedy(self) -> Tensor | None:
        """Which rows are decoded greedily though others are sampled, [B] bool; None if none is."""
        for item in self.processors or ():
            if type(item) is EachRow and item.greedy:
                return item.numbers[0] == 0
        return None

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the `WARPERS` alone, as to a drafter's proposals, in `dtype`: [..., V] -> same."""
        flat = logits.reshape(-1, logits.shape[-1]).to(self.dtype)
        for processor in self.processors or ():
            if type(processor) in WARPERS:
                flat = warped(processor, flat)
        return flat.view(logits.shape)

    def process_each(self, logits: Tensor, before: Before = _NOTHING) -> Tensor:
        """Apply every processor to each row of [..., V] by itself, in `dtype`.

        Args:
            before: what a `penalty` and those of `OF_TEXT` need. There may be no `readers`.
        """
        flat = logits.reshape(-1, logits.shape[-1]).to(self.dtype, copy=True)
        penalty = self.penalty
        for processor in self.processors or ():
            if penalty is not None and processor is penalty:
                assert before.seen is not None
                flat = penalise(flat, before.seen, penalty.penalty)
            elif (of_text := OF_TEXT.get(type(processor))) is not None:
                flat = of_text(processor, flat, before)
            else:
                flat = warped(processor, flat)
        return flat.view(logits.shape)

    def process(self, prefix: Tensor, logits: Tensor, rows: Sequence[bool] | None = None) -> Tensor:
        """Apply every processor to logits [B, V] after `prefix` [B, T], in `dtype`.

        Args:
            rows: the rows that hold a true text, all when None; a `prefix_allowed_tokens_fn` is
                called for those alone.
        """
        scores = logits.to(self.dtype, copy=True)  # a user's processor may write into it
        for item in self.processors or ():
            if type(item) in WARPERS:
                scores = warped(item, scores)
                continue
            if rows is not None and type(item) is hf.PrefixConstrainedLogitsProcessor:
                item = only_rows(item, rows, scores.shape[-1])
            scores = LogitsProcessorList([item])(prefix, scores)  # type: ignore[arg-type]
        return scores

    def choose(self, scores: Tensor, positions: Tensor) -> Tensor:
        """The token chosen after each row of processed scores: [B, M, V], [B, M] -> [B, M].

        Greedy, or the argmax of score + Gumbel noise at the position that the token will have; -1
        where the scores are no distribution.
        """
        if self.seeds is None:
            return self.best(scores)
        token = self._noisy(scores, positions, None, Stream.TARGET, True)
        if token is None:
            token = best_with_noise(scores, self.seeds, positions)
        if (greedy := self.greedy) is not None:
            token = torch.where(greedy.unsqueeze(1), self.best(scores), token)
        return token

    def best(self, scores: Tensor) -> Tensor:
        """See `argmax`."""
        found = best_tokens(scores) if self.kernels else None
        return argmax(scores) if found is None else found

    def perturb(
        self,
        scores: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
        stream: Stream = Stream.TARGET,
    ) -> Tensor:
        """Scores [B, M, V] plus the noise of (seed, position [B, M] or [B, 1], token), float64.

        Rows that are decoded greedily have no noise.

        Args:
            tokens: [V], or [B, M, V], the token ids that the columns stand for; 0 … V - 1 when
                None.
        """
        assert self.seeds is not None
        found = self._noisy(scores, positions, tokens, stream, False)
        if found is None:
            found = add_noise(scores, self.seeds, positions, tokens, stream)
        if (greedy := self.greedy) is not None:
            found = torch.where(greedy.view(-1, 1, 1), scores.double(), found)
        return found

    def _noisy(
        self, scores: Tensor, positions: Tensor, tokens: Tensor | None, stream: Stream, choose: bool
    ) -> Tensor | None:
        if not self.kernels or self.seeds is None:
            return None
        return with_noise(scores, self.seeds, positions, tokens, stream.first, choose)

    def uniforms(self, positions: Tensor, draws: int, stream: Stream) -> Tensor:
        """`draws` uniforms in (0, 1) for each of the positions: [B, M] -> [B, M, draws] float64."""
        assert self.seeds is not None
        numbers = torch.arange(draws, device=positions.device) + stream.first
        return uniform(self.seeds, positions, numbers)


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
    # A uniform near 1, or a sum taken in another order, may be off by one token.
    missed = probabilities.gather(-1, token) <= 0
    token = torch.where(missed, probabilities.argmax(-1, keepdim=True), token)
    return token.masked_fill_(~((total > 0) & (total < torch.inf)), -1)


def argmax(scores: Tensor) -> Tensor:
    """The best token of each row, [..., V] -> [...], and -1 where a row holds a NaN.

    >>> argmax(torch.tensor([[1.0, 3.0, 2.0], [9.0, float("nan"), 2.0]])).tolist()
    [1, -1]
    """
    best, token = best_of(scores, 1)
    return token.masked_fill_(best.isnan(), -1).squeeze(-1)


def only_rows(
    asked: hf.PrefixConstrainedLogitsProcessor, rows: Sequence[bool], vocabulary: int
) -> hf.PrefixConstrainedLogitsProcessor:
    """A user's `prefix_allowed_tokens_fn`, asked about some rows alone; the others may do all."""
    everything, function = list(range(vocabulary)), asked._prefix_allowed_tokens_fn

    def allowed(row: int, text: Tensor) -> list[int]:
        return function(row, text) if rows[row] else everything

    return hf.PrefixConstrainedLogitsProcessor(allowed, 1)
