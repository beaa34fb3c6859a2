"""What a training measures of itself, line by line in `metrics.jsonl`.

A line is JSON, and is of a step: of training (`loss`), or of a validation (`tau`).

    step, seconds          of training so far, and its time
    loss, learning_rate, grad_norm
                           the mean loss since the last such line, and the last step's others
    loss_by_depth          the same mean of each depth alone, without its weight in the loss
    accuracy_by_depth      of the labels since the last such line, at each depth the share that were
                           the drafter's most likely token; null where there was none
    tokens_per_second      of real tokens, no padding, over all processes; validation is not counted
    memory_bytes           the most that this process has used: of the GPU, or of its own memory
    share_of_peak          products of a step, by arithmetic, over what the GPU's data sheet allows;
                           only where the device is known
    tau, tau_se, simulated_tau, acceptance_by_depth
                           of a validation, see `validate`
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from headstart.heads.core.files import append_line, flush_to_disk, write_atomically

from ..fit.clock import Clock
from ..processes.agreement import sum_over_processes
from ..processes.memory import peak_memory

LEFT_OUT = ("tree", "tree_shares", "tau_by_source", "tau_by_prompt", "rounds", "samples")
"""What a validation measures and a line does not tell: it is in the artifact's manifest or
its report."""

_OF_TRAINING = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "share_of_peak",
)  # fmt: skip

# Dense products in bfloat16, 1e12 a second, by the makers' data sheets; the first name that is part
# of the device's counts.
_PEAKS = (
    ("B200", 2250.0), ("H100 PCIe", 756.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0),
    ("A100", 312.0), ("L40S", 362.0), ("RTX 4090", 165.0), ("RTX 3090", 71.0), ("A10G", 70.0),
    ("L4", 121.0),
)  # fmt: skip


def peak_of(device: str) -> float | None:
    """The peak of a GPU by its name, in products a second; None where it is not known.

    >>> peak_of("NVIDIA A100-SXM4-80GB"), peak_of("a new one")
    (312000000000000.0, None)
    """
    found = (peak for name, peak in _PEAKS if name in device)
    return next((peak * 1e12 for peak in found), None)


class Metrics(TrainerCallback):
    """Writes `metrics.jsonl` on process 0.

    Args:
        path: the file; a resumed run keeps its lines up to the step that it goes on from.
        lengths: [n], tokens of each training row.
        processes: how many train, on about equally many tokens.
        flops: products of a training step for each token; None where they are not known.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        lengths: np.ndarray,
        processes: int = 1,
        flops: float | None = None,
    ):
        self.path, self.clock, self.lengths = path, clock, lengths
        self.processes, self.flops = processes, flops
        gpu = torch.cuda.is_available()
        self.peak = peak_of(torch.cuda.get_device_name()) if gpu else None
        self.lines: list[str] = []  # that the file has when training begins
        self.tokens, self.active = 0, 0.0  # since the last line of training
        # Then [K] and [2, K], on the device.
        self.steps, self.by_depth, self.hits = 0, torch.zeros(()), torch.zeros(()).long()
        self.listed: dict[str, list[float | None]] = {}  # of the last `measured`, by depth
        self.mark = time.perf_counter()

    def count(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Note the batches of a step."""
        self.tokens += sum(real_tokens(batch, self.lengths) for batch in batches)

    def add(self, by_depth: Tensor, hits: Tensor, own_text: bool = False) -> None:
        """Note a micro-batch's part of the step's loss by depth, [K], and its `hits`, [2, K], see
        `DraftLoss`, without a read from a GPU.

        A drafter's own text counts for the loss alone: its most likely tokens are what it wrote.
        """
        self.by_depth = by_depth + self.by_depth
        if not own_text:
            self.hits = hits + self.hits

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark = time.perf_counter()
        self.lines = read_lines(self.path, state.global_step) if state.global_step else []
        self._save(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.active, self.mark = self.active + now - self.mark, now
        self.steps += 1

    def measured(self) -> dict[str, Any]:
        """What a line of training tells beside the loss, since the last such line.

        All processes call it, since losses are summed over them.
        """
        found: dict[str, Any] = {"memory_bytes": peak_memory()}
        self.listed = self._by_depth() if self.steps else {}
        found |= self.listed
        if self.active:
            speed = found["tokens_per_second"] = self.tokens * self.processes / self.active
            if self.flops and self.peak:
                found["share_of_peak"] = speed * self.flops / (self.peak * self.processes)
        self.tokens, self.active = 0, 0.0
        self.steps, self.by_depth, self.hits = 0, torch.zeros(()), torch.zeros(()).long()
        return found

    def _by_depth(self) -> dict[str, list[float | None]]:
        """The loss and the accuracy of each depth, over all processes."""
        means, place = (self.by_depth / self.steps).view(-1).tolist(), self.by_depth.device
        own = [*means, *self.hits.expand(2, len(means)).flatten().tolist()]
        losses, hits, labels = np.reshape(sum_over_processes(own, place), (3, -1)).tolist()
        found: dict[str, list[float | None]] = {"loss_by_depth": losses}
        if any(labels):
            shares = zip(hits, labels, strict=True)
            found["accuracy_by_depth"] = [hit / count if count else None for hit, count in shares]
        return found

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self._write(state, {name: logs.get(name) for name in _OF_TRAINING} | self.listed)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._write(state, _validation(metrics))
        self.mark = time.perf_counter()

    def replace_validations(
        self, state: Any, measured: Mapping[int, tuple[float, Mapping[str, Any]]]
    ) -> None:
        """Put others in the place of all validations so far.

        Args:
            measured: by step, the seconds of training and what was measured, as in `on_evaluate`.
        """
        lines = [line for line in map(json.loads, self.lines) if "tau" not in line]
        for step, (seconds, metrics) in measured.items():
            lines.append(_line(step, seconds, _validation(metrics)))
        lines.sort(key=lambda line: line["step"])
        self.lines = [json.dumps(line, allow_nan=False) + "\n" for line in lines]
        self._save(state)
        self.mark = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:  # a run goes on from here, with the lines so far
            flush_to_disk(self.path)
        self.mark = time.perf_counter()

    def _write(self, state: Any, found: dict[str, Any]) -> None:
        line = _line(state.global_step, self.clock.seconds, found)
        if state.is_world_process_zero:  # at its end: a long training has tens of thousands
            append_line(self.path, json.dumps(line, allow_nan=False))

    def _save(self, state: Any) -> None:
        if state.is_world_process_zero:
            write_atomically(self.path, "".join(self.lines))


def _line(step: int, seconds: float, found: Mapping[str, Any]) -> dict[str, Any]:
    line = {"step": step, "seconds": round(seconds, 3), **found}
    return {name: finite(value) for name, value in line.items() if value is not None}


def _validation(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a line tells of a validation."""
    named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if name not in LEFT_OUT}


def finite(value: Any) -> Any:
    """The value without what JSON has no word for: None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def real_tokens(batch: Mapping[str, Any], lengths: np.ndarray) -> int:
    """Tokens of a batch without its padding."""
    if batch.get("segments") is not None:
        return int((batch["segments"] >= 0).sum())
    rows: Tensor | None = batch["rows"]
    return batch["tokens"].numel() if rows is None else int(lengths[rows.numpy()].sum())


def read_lines(path: Path, step: int) -> list[str]:
    """The whole lines of a file up to a step; none where there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    return [line for line in whole if json.loads(line)["step"] <= step]


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What trackers can draw of a validation: its numbers, and lists of them one by one.

    >>> scalars({"eval_tau": 2.0, "eval_acceptance_by_depth": [0.5, None], "eval_tree": [[0]]})
    {'eval_tau': 2.0, 'eval_acceptance_by_depth_1': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        listed = enumerate(value, 1) if isinstance(value, list) else ()
        each = {f"{name}_{i}": item for i, item in listed} | {name: value}
        found |= {n: v for n, v in each.items() if isinstance(v, int | float)}
    return found
