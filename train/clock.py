"""How far training is, which bounds it, and the bar that shows it."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback


class Clock:
    """How far training is, as a share of its bounds; process 0's clock counts for all."""

    def __init__(self, max_steps: int, max_seconds: float | None, warmup: float):
        self.max_steps, self.max_seconds, self.warmup = max_steps, max_seconds, warmup
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.share = 0.0

    def start(self, seconds: float = 0.0) -> None:
        """Start, `seconds` having been trained before the run was resumed."""
        self.started = time.perf_counter() - seconds

    def read(self, steps: int) -> None:
        """Read the clock after `steps` steps."""
        self.seconds = time.perf_counter() - self.started
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            told = [self.seconds]
            torch.distributed.broadcast_object_list(told, src=0)
            self.seconds = told[0]
        self.share = steps / self.max_steps
        if self.max_seconds is not None:
            self.share = max(self.share, self.seconds / self.max_seconds)

    def at(self, step: int) -> float:
        """The share at the coming step, the one after `step` steps."""
        # Its middle, so that neither the first nor the last trains at a rate of zero.
        return min(max(self.share, (step + 0.5) / self.max_steps), 1.0)

    def factor(self, step: int, since: float = 0.0) -> float:
        """Learning-rate factor for the coming step: a linear rise, then a cosine down to zero.

        Args:
            since: the share at which it rises; it is zero before.
        """
        share = (self.at(step) - since) / (1 - since)
        if share < 0:
            return 0.0
        if share < self.warmup:
            return share / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (share - self.warmup) / (1 - self.warmup)))


class Bounds(TrainerCallback):
    """Reads the clock, and ends training with a last validation and checkpoint when time is up."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:  # resumed: the first step must know where it stands
            self.clock.read(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.read(state.global_step)
        if self.clock.share >= 1.0:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = True


class Progress(TrainerCallback):
    """A bar on stderr over the share of the bounds, with the last loss and τ."""

    def __init__(self, clock: Clock, enabled: bool):
        self.clock, self.enabled = clock, enabled
        self.seen: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        off = not (self.enabled and state.is_world_process_zero)
        self.bar = tqdm(total=1.0, desc="heads", disable=off, bar_format=layout)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(min(self.clock.share, 1.0) - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, label in (("loss", "loss"), ("eval_tau", "τ")):
            if name in logs:
                self.seen[label] = f"{logs[name]:.3f}"
        self.bar.set_postfix(self.seen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()
