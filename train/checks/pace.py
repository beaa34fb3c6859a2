"""How long a run takes and what memory it has, from a few steps on the real target."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.infer import Speculator
from headstart.infer.measure.own_text import decode_texts

from ..data.training_rows import Row, Rows
from ..data.writers import examples_of
from ..fit.target_with_drafter import TargetWithDrafter
from ..processes.memory import WRITING, enough_memory, peak_memory
from ..recipe import Distill, Recipe

_WRITTEN = 32  # tokens of a text by which the speed of writing is measured


class Measured(NamedTuple):
    """What a training takes of time and memory."""

    step_s: float  # a step of the optimizer, in the mean over the stages
    peak: int  # bytes in use
    row_s: float = 0.0  # to compute a row's features once, where they are kept in memory


@dataclass(frozen=True)
class Pace:
    """What a few steps took, and what follows for the whole run on one process."""

    written_tokens_s: float  # that the target writes a second, in a batch of the recipe's size
    step_s: float  # a training step with the recipe's rows and longest texts, in the mean
    peak: int  # bytes on the GPU; of the process where there is none
    distill_s: float
    train_s: float
    features_s: float  # of it, before the first step, where features are kept in memory; else 0

    @property
    def hours(self) -> float:
        """Of distillation and training; validation and the benchmark are not in it."""
        return (self.distill_s + self.train_s) / 3600


def measure_writing(
    target: PreTrainedModel, prompts: Sequence[Tensor], spec: Distill, documents: int
) -> tuple[int, float]:
    """How many tokens the target writes in one batch of the recipe's size, and the seconds.

    Args:
        prompts: [P] each, and again from the first one until the batch is full.
        documents: of the training set, see `examples_of`.
    """
    size = max(min(spec.batch_size, examples_of(spec, documents)), 1)
    batch = list(islice(cycle(prompts), size))
    plain = Speculator(target)  # which tries whether it can decode, before the time begins
    started = time.perf_counter()
    with enough_memory(WRITING):
        decode_texts(plain, batch, min(spec.new_tokens, _WRITTEN))
    written = size + int(plain.stats.counts.sum())  # the first ones are of the prompts' forward
    return written, time.perf_counter() - started


def measure_steps(
    module: TargetWithDrafter, recipe: Recipe, vocab_size: int, length: int,
    room: int | None = None, kept: bool = False,
) -> Measured:  # fmt: skip
    """What a training step takes: of three steps, the fastest.

    Where the stages of a training differ, each is measured, and the seconds are the mean over all
    steps. One of a step's micro-batches is computed, and counted as often as there are.

    Args:
        length: tokens of each row.
        room: tokens of a row of the batch, in which several are packed; `length` when None.
        kept: whether the training keeps all features in memory, see `fill_cache`.
    """
    spec, rows = recipe.train, recipe.train.batch_size
    batches = spec.accumulation(1)
    device = module.target.device
    tokens = torch.randint(vocab_size, (rows, room or length), device=device)
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    batch = {"tokens": tokens, "supervised": supervised}
    if room is not None:
        every = torch.arange(room, device=device).expand_as(tokens)
        batch |= {"segments": (every // length).int(), "positions": every % length}
    numbers, row_s = _keep_features(module, tokens, length) if kept else (None, 0.0)
    if room is None and numbers is not None:
        numbers = numbers[:, 0]
    learning = [p for part in module.trained() for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, 1e-5)
    module.train()
    mean = 0.0
    for share, options in module.stages():
        times = []
        for _ in range(3):
            _wait(device)
            started = time.perf_counter()
            module(numbers, **batch, **options)["loss"].backward()
            _wait(device)
            computed = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            _wait(device)
            times.append(batches * (computed - started) + time.perf_counter() - computed)
        mean += share * min(times)
    module.eval()
    return Measured(mean, peak_memory(), row_s)


def _keep_features(module: TargetWithDrafter, tokens: Tensor, length: int) -> tuple[Tensor, float]:
    """Keep the features of a batch as a training does.

    Returns:
        The numbers of the rows [B, S] of `length` tokens that stand in each row of the batch, and
        the seconds that one took, in the faster of two tries.
    """
    ends = range(length, tokens.shape[1], length)
    texts = [text for row in tokens.int().cpu().numpy() for text in np.split(row, ends)]
    rows = Rows.of(Row(str(n), text, np.ones(len(text), bool)) for n, text in enumerate(texts))
    times = []
    for _ in range(2):
        _wait(tokens.device)
        started = time.perf_counter()
        module.fill_cache(rows, math.inf)
        _wait(tokens.device)
        times.append(time.perf_counter() - started)
    numbers = torch.arange(len(texts), device=tokens.device).view(len(tokens), -1)
    return numbers, min(times) / len(texts)


def pace_of(
    recipe: Recipe,
    wrote: tuple[int, float],
    step: Measured,
    documents: int,
    each: tuple[float, float],
    packed: float = 1.0,
) -> Pace:
    """What was measured, and the whole run's times; bounds in seconds of the recipe are kept.

    Args:
        wrote: tokens that the target wrote, and seconds; the shape of a batch is the recipe's.
        step: what `measure_steps` says.
        documents: of the training set; see `examples_of`.
        each: rows and answers of a document, see `per_document`.
        packed: how many rows stand in one of a batch, where they are packed.
    """
    speed = wrote[0] / wrote[1]
    spec, train = recipe.distill, recipe.train
    units, (rows, answers) = examples_of(spec, documents), each
    steps = train.max_steps
    if train.epochs is not None:
        step_rows = train.batch_size * train.accumulation(1) * packed
        steps_an_epoch = math.ceil(units * rows / step_rows)
        steps = min(steps, math.ceil(train.epochs * steps_an_epoch))
    own = spec.writer == "own"  # what a server takes is not known
    total = units * min(answers * spec.new_tokens, rows * spec.row_tokens) if own else 0
    bounds = spec.max_seconds, train.max_seconds
    features = units * rows * step.row_s
    asked = total / speed, features + step.step_s * steps
    distill, training = (
        min(s, bound) if bound is not None else s for s, bound in zip(asked, bounds, strict=True)
    )
    return Pace(speed, step.step_s, step.peak, distill, training, features)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
