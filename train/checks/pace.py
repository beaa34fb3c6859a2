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
    module: TargetWithDrafter, recipe: Recipe, vocab_size: int, length: int, room: int | None = None
) -> tuple[float, int]:
    """Seconds of a training step, and the memory then in use: of three steps, the fastest.

    Where the stages of a training differ, each is measured, and the seconds are the mean over all
    steps. One of a step's micro-batches is computed, and counted as often as there are.

    Args:
        length: tokens of each row.
        room: tokens of a row of the batch, in which several are packed; `length` when None.
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
    learning = [p for part in module.trained() for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, 1e-5)
    module.train()
    mean = 0.0
    for share, options in module.stages():
        times = []
        for _ in range(3):
            _wait(device)
            started = time.perf_counter()
            module(None, **batch, **options)["loss"].backward()
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
    packed: float = 1.0,
) -> Pace:
    """What was measured, and the whole run's times; bounds in seconds of the recipe are kept.

    Args:
        wrote: tokens that the target wrote, and seconds; the shape of a batch is the recipe's.
        step: see `measure_steps`.
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
