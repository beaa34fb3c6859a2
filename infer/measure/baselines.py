"""Those who decode the same prompts against each other: the loop, `generate`, and a bare loop.

They take turns on each prompt, several times over, so that a machine whose speed drifts slows all
of them alike. Times run from a prompt's first tokens to its last; the prefill is kept apart.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..speculator import Speculator
from .timing import wait


class Timed(NamedTuple):
    """One run of one contender.

    Attributes:
        text: [1, P + new].
        prefill: seconds until its first tokens; decode: seconds after them.
        first: how many new tokens the first were.
    """

    text: Tensor
    prefill: float
    decode: float
    first: int = 1


Contender = Callable[[Tensor], Timed]
"""Decodes one prompt [1, P]."""


@dataclass
class Runs:
    """One contender's runs of one prompt: seconds per run, and the new tokens of the last one."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first: int = 1

    def note(self, run: Timed, prompt: int) -> None:
        """Keep one run of a prompt of so many tokens."""
        self.decode.append(run.decode)
        self.prefill.append(run.prefill)
        self.tokens, self.first = run.text[0, prompt:].tolist(), run.first

    @property
    def seconds(self) -> float:
        """The median run's seconds after the first tokens."""
        return statistics.median(self.decode)

    @property
    def per_token(self) -> float:
        """Milliseconds per token after the first ones."""
        return 1e3 * self.seconds / max(len(self.tokens) - self.first, 1)


def speculating(speculator: Speculator, **options: Any) -> Contender:
    """Our loop, with the options of its `generate`."""

    def decode(ids: Tensor) -> Timed:
        text = speculator.generate(ids, **options)
        return Timed(text, speculator.stats.prefill_seconds, speculator.stats.decode_seconds)

    return decode


def generating(model: PreTrainedModel, **options: Any) -> Contender:
    """`generate` of transformers, with these options."""

    def decode(ids: Tensor) -> Timed:
        clock, begun = _Clock(), time.perf_counter()
        text = model.generate(ids, streamer=clock, **options)  # type: ignore[operator]
        wait(ids.device)
        return Timed(text, clock.at - begun, time.perf_counter() - clock.at, clock.first)

    return decode


def bare_loop(model: PreTrainedModel, new_tokens: int) -> Contender:
    """The least that greedy decoding with transformers can be: a DynamicCache and an argmax."""

    def decode(ids: Tensor) -> Timed:
        begun = time.perf_counter()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            text = [ids, token]
            wait(ids.device)
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                text.append(token)
            wait(ids.device)
        return Timed(torch.cat(text, 1), first - begun, time.perf_counter() - first)

    return decode


class Raced(NamedTuple):
    """A prompt [1, P] and every contender's runs of it."""

    prompt: Tensor
    runs: dict[str, Runs]


def race(
    contenders: Mapping[str, Contender],
    prompts: Sequence[Tensor],
    device: torch.device,
    repeats: int,
    title: str = "bench",
) -> Iterator[Raced]:
    """Decode every prompt with every contender in turn, `repeats` times, once warmed up.

    Args:
        prompts: token ids, each [P] or [1, P].
        title: of the bar on stderr.
    """
    for number, prompt in enumerate(tqdm(prompts, desc=title, unit="prompt", file=sys.stderr)):
        ids = prompt.reshape(1, -1).to(device)
        runs = {name: Runs() for name in contenders}
        for repeat in range(-1 if number == 0 else 0, repeats):
            for name, decode in contenders.items():
                run = decode(ids)
                if repeat >= 0:
                    runs[name].note(run, ids.shape[1])
        yield Raced(ids, runs)


class _Clock(BaseStreamer):
    """A streamer that notes when `generate` hands over its first tokens, and how many they are."""

    def __init__(self) -> None:
        self.calls, self.at, self.first = 0, 0.0, 1

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the prompt comes before them
            self.at, self.first = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass
