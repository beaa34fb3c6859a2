"""How long a run takes and what memory it has, from a few steps on the real target."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.infer.measure.own_text import Written

from ..data.writers import examples_of
from ..fit.target_with_drafter import TargetWithDrafter
from ..recipe import Recipe


@dataclass(frozen=True)
class Pace:
    """What a few steps took, and what follows for the whole run on one process."""

    written_tokens_s: float  # that the target writes a second, in a batch of the recipe's size
    step_s: float  # a training step with the recipe's rows and longest texts, in the mean
    peak: int  # bytes on the GPU; of the process where there is none
    distill_s: float
    train_s: float

    @property
    def hours(self) -> float:
        """Of distillation and training; validation and the benchmark are not in it."""
        return (self.distill_s + self.train_s) / 3600


def measure_steps(
    module: TargetWithDrafter, recipe: Recipe, vocab_size: int, length: int
) -> tuple[float, int]:
    """Seconds of a training step, and the memory then in use: of three steps, the fastest.

    Where the stages of a training differ, each is measured, and the seconds are the mean over all
    steps. One of a step's micro-batches is computed, and counted as often as there are.

    Args:
        length: tokens of each row.
    """
    spec, rows = recipe.train, recipe.train.batch_size
    batches = spec.accumulation(1)
    device = module.target.device
    tokens = torch.randint(vocab_size, (rows, length), device=device)
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    learning = [p for part in module.trained() for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, 1e-5)
    module.train()
    mean = 0.0
    for share, options in module.stages():
        times = []
        for _ in range(3):
            _wait(device)
            started = time.perf_counter()
            module(None, tokens, supervised, **options)["loss"].backward()
            _wait(device)
            computed = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            _wait(device)
            times.append(batches * (computed - started) + time.perf_counter() - computed)
        mean += share * min(times)
    module.eval()
    return mean, peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Bytes that were in use at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # no POSIX
        return 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def pace_of(
    recipe: Recipe,
    wrote: tuple[int, float],
    step: tuple[float, int],
    documents: int,
    each: tuple[float, float],
) -> Pace:
    """What was measured, and the whole run's times; bounds in seconds of the recipe are kept.

    Args:
        wrote: tokens that the target wrote, and seconds; the shape of a batch is the recipe's.
        step: see `measure_steps`.
        documents: of the training set; see `examples_of`.
        each: rows and answers of a document, see `per_document`.
    """
    speed = wrote[0] / wrote[1]
    spec, train = recipe.distill, recipe.train
    units, (rows, answers) = examples_of(spec, documents), each
    steps = train.max_steps
    if train.epochs is not None:
        steps_an_epoch = math.ceil(units * rows / (train.batch_size * train.accumulation(1)))
        steps = min(steps, math.ceil(train.epochs * steps_an_epoch))
    own = spec.writer == "own"  # what a server takes is not known
    total = units * min(answers * spec.new_tokens, rows * spec.row_tokens) if own else 0
    bounds = spec.max_seconds, train.max_seconds
    asked = total / speed, step[0] * steps
    kept = [
        min(s, bound) if bound is not None else s for s, bound in zip(asked, bounds, strict=True)
    ]
    return Pace(speed, step[0], step[1], *kept)


def texts_tokens(texts: Sequence[Written]) -> int:
    """Tokens that were written after the prompts."""
    return sum(len(text.tokens) - text.prompt for text in texts)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
