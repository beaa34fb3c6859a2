"""What becomes of the validations of a run that goes on with other settings of decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..figures.metrics import Metrics
from .checkpoints import step_of

logger = logging.getLogger(__name__)


class Revalidation(TrainerCallback):
    """Measures the checkpoints of a resumed run anew where other settings measured them.

    τ by one tree or rule does not compare with τ by another. What was measured of steps without a
    checkpoint is forgotten; of the others the best one by the present settings is the best so far.

    Args:
        measure: loads a checkpoint's weights, and returns what validation says of them, each name
            after `eval_`.

    Attributes:
        due: the checkpoints to measure, in the order of their steps, each with its seconds of
            training. Training goes on from the last one, whose weights stay loaded.
    """

    def __init__(self, measure: Callable[[Path], dict[str, Any]], metrics: Metrics):
        self.measure, self.metrics = measure, metrics
        self.due: Mapping[Path, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        others = [entry for entry in state.log_history if "eval_tau" not in entry]
        if not self.due or len(others) == len(state.log_history):  # there was no validation yet
            return
        logger.info("heads: validation has other settings; checkpoints are measured anew")
        state.log_history, state.best_metric, lines = others, None, {}
        for checkpoint, seconds in self.due.items():
            step, measured = step_of(checkpoint), self.measure(checkpoint)
            state.log_history.append({"step": step} | measured)
            lines[step] = seconds, measured
            if state.best_metric is None or measured["eval_tau"] > state.best_metric:
                state.best_metric, state.best_global_step = measured["eval_tau"], step
                state.best_model_checkpoint = str(checkpoint)
        self.metrics.replace_validations(state, lines)
