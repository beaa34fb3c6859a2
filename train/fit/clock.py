"""The share of the training that is done, the bounds that end it, and the progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl

from headstart.infer.measure.progress import progress_bar


class Clock(TrainerCallback):
    """The share of the training that is done, by steps or by time, whichever is further.

    It is `read` after every step, with the time of process 0. When time is up, training ends with a
    last validation and checkpoint. `warmup` is the share in which the learning rate rises.
    The `prepared` seconds before the first step are part of `max_seconds`, and of no share.
    """

    def __init__(self, max_steps: int, max_seconds: float | None, warmup: float):
        self.max_steps, self.max_seconds, self.warmup = max_steps, max_seconds, warmup
        self.share = self.prepared = 0.0
        self.start(0.0)

    def start(self, seconds: float) -> None:
        """Start; a resumed run has trained for `seconds` before."""
        self.seconds = seconds
        self.started = time.perf_counter() - seconds

    def elapsed(self) -> float:
        """Seconds of training by this process's own time."""
        return time.perf_counter() - self.started

    def little_left(self) -> str:
        """A sentence where less than half of the time is left for steps; empty otherwise."""
        if self.max_seconds is None or self.prepared <= self.max_seconds / 2:
            return ""
        return (
            f"{self.prepared:.0f} of train.max_seconds' {self.max_seconds:.0f} seconds went into "
            "the target's features, before the first step: raise it, or end what else uses this "
            "machine."
        )

    def read(self, steps: int, seconds: float) -> None:
        """Take note of the steps and seconds of training so far."""
        self.seconds = seconds
        self.share = self._share(steps, seconds)

    def _share(self, steps: float, seconds: float) -> float:
        share = steps / self.max_steps
        if self.max_seconds is None:
            return share
        spent, bound = seconds - self.prepared, self.max_seconds - self.prepared
        return max(share, spent / bound if bound > 0 else 1.0)

    def at(self, step: float, seconds: float | None = None) -> float:
        """The share in the middle of the step after `step` steps: none trains at a rate of zero.

        Args:
            seconds: of training before that step; None for the next one.
        """
        share = self.share if seconds is None else self._share(step, seconds)
        return min(max(share, (step + 0.5) / self.max_steps), 1.0)

    def factor(self, step: int, since: float = 0.0) -> float:
        """The learning rate's factor at the step that follows `step` steps.

        It is zero up to the share `since`; then comes a linear rise, then a cosine down to zero.
        """
        share = (self.at(step) - since) / (1 - since)
        if share < 0:
            return 0.0
        if share < self.warmup:
            return share / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (share - self.warmup) / (1 - self.warmup)))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step:  # resumed
            self.start(self.seconds)  # what was prepared again is counted once
            self.read(state.global_step, self.seconds)
            control.should_training_stop = self.share >= 1.0  # it was killed after its last step
            # The optimizer's state has the next rate of the schedule that it was saved under: 0
            # where that had ended, and this one goes on.
            schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # as engines wrap it
            rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [rate * factor(schedule.last_epoch) for rate, factor in rates]
            for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.share >= 1.0:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = control.should_save = True


class StepEnd(TrainerCallback):
    """Calls `act` after each step, before the callbacks that follow it in the trainer's list."""

    def __init__(self, act: Callable[[TrainerControl], None]):
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(control)


class Progress(TrainerCallback):
    """A bar or lines on stderr over the clock's share, with the step and the last figures.

    These are the loss, the accuracy of depth 1 (`top-1`), and τ.
    """

    def __init__(self, clock: Clock, enabled: bool):
        self.clock, self.enabled = clock, enabled
        self.seen: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        off = not (self.enabled and state.is_world_process_zero)
        self.bar = progress_bar(1.0, "heads", disable=off, initial=min(self.clock.share, 1.0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen["step"] = str(state.global_step)
        self.bar.update(min(self.clock.share, 1.0) - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = ("loss", "loss"), ("accuracy_by_depth_1", "top-1"), ("eval_tau", "τ")
        for name, label in shown:
            if name in logs:
                self.seen[label] = f"{logs[name]:.3f}"
        self.bar.set_postfix(self.seen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()
