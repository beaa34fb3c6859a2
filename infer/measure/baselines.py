"""Ways to decode a prompt that are timed against each other: our loop, `generate`, a bare loop.

Times run from a prompt's first tokens to its last; the prefill is kept apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.heads.core import CACHE

from ..speculator import Speculator
from ..stats import Stats
from .progress import with_progress
from .timing import Stopwatch, take_turns


class Timed(NamedTuple):
    """One decoded prompt, or a batch of them."""

    text: Tensor  # [B, P + new]
    prefill_ms: float  # until its first tokens
    decode_ms: float  # after them
    first: int = 1  # how many new tokens the first were, of all rows together
    stats: Stats | None = None  # of our own loop


TimedDecode = Callable[..., Timed]
"""Decodes a prompt [1, P]; or a batch [B, P], padded on the left, with its mask, and seeds by row.

`generate` takes no seeds, and draws from torch's default generator.
"""


@dataclass(frozen=True)
class Runs:
    """One prompt, decoded several times in the same way."""

    tokens: list[int]  # the new ones of the last run
    first: int  # how many of them came first, and are not in `decode_ms`
    decode_ms: float  # after the first tokens, the median run
    prefill_ms: list[float]  # until the first tokens, every run

    @classmethod
    def of(cls, runs: Sequence[Timed], prompt: int) -> Runs:
        """The runs of a prompt of so many tokens."""
        tokens, first = runs[-1].text[0, prompt:].tolist(), runs[-1].first
        decode_ms = statistics.median(run.decode_ms for run in runs)
        return cls(tokens, first, decode_ms, [run.prefill_ms for run in runs])

    @property
    def per_token(self) -> float:
        """Milliseconds per token after the first ones."""
        return self.decode_ms / max(len(self.tokens) - self.first, 1)


def timed_speculator(speculator: Speculator, **options: Any) -> TimedDecode:
    """Our loop, with the options of its `generate`; drafters remember nothing of what it writes."""

    def decode(ids: Tensor, mask: Tensor | None = None, seeds: Any = None) -> Timed:
        masked = {} if mask is None else {"attention_mask": mask}
        seeded = {"seed": seeds} if seeds and options.get("do_sample") else {}
        remembers, speculator.remembers = speculator.remembers, False
        try:
            text = speculator.generate(ids, **masked, **options, **seeded)
        finally:
            speculator.remembers = remembers
        stats = speculator.stats
        times = 1e3 * stats.prefill_seconds, 1e3 * stats.decode_seconds
        return Timed(text, *times, first=len(ids), stats=stats)

    return decode


def timed_generate(model: PreTrainedModel, **options: Any) -> TimedDecode:
    """`generate` of transformers, with these options."""

    def decode(ids: Tensor, mask: Tensor | None = None, seeds: Any = None) -> Timed:
        watch = Stopwatch(ids.device)
        first, begin = _FirstTokens(watch), watch.mark()
        masked = {} if mask is None else {"attention_mask": mask}
        text = model.generate(ids, streamer=first, **masked, **options)  # type: ignore[operator]
        prefill = watch.between(begin, first.at)
        return Timed(text, prefill, watch.between(first.at, watch.mark()), first.count)

    return decode


def timed_bare_loop(model: PreTrainedModel, new_tokens: int) -> TimedDecode:
    """The least that greedy decoding with transformers can be: a DynamicCache and an argmax."""

    @torch.no_grad()
    def decode(ids: Tensor, mask: Tensor | None = None, seeds: Any = None) -> Timed:
        assert mask is None or bool(mask.all()), "one prompt, without padding"
        watch = Stopwatch(ids.device)
        begin, cache = watch.mark(), DynamicCache(config=model.config)
        token = model(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        prefill, text = watch.between(begin, first := watch.mark()), [ids, token]
        for _ in range(new_tokens - 1):
            token = model(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            text.append(token)
        return Timed(torch.cat(text, 1), prefill, watch.between(first, watch.mark()))

    return decode


def decode_in_turns(
    decoders: Mapping[str, TimedDecode],
    prompts: Sequence[Tensor],
    device: torch.device,
    repeats: int,
    title: str = "bench",
) -> Iterator[tuple[Tensor, dict[str, Runs]]]:
    """Decode every prompt [P] or [1, P] in every way in turn, `repeats` times, after a warm-up.

    Yields:
        Each prompt, [1, P], and its runs by the decoders' names.
    """
    for number, prompt in enumerate(with_progress(prompts, title, "prompt")):
        ids = prompt.reshape(1, -1).to(device)
        if number == 0:  # warms up
            take_turns(decoders, [ids])
        runs = take_turns(decoders, [ids] * repeats)
        yield ids, {name: Runs.of(each, ids.shape[1]) for name, each in runs.items()}


class _FirstTokens(BaseStreamer):
    """A streamer that notes when `generate` hands over its first tokens, and how many they are."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.calls, self.at, self.count = watch, 0, watch.mark(), 1

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the prompt comes before them
            self.at, self.count = self.watch.mark(), value.numel()

    def end(self) -> None:
        pass
