"""Trains a drafter on a frozen target: a thin subclass of transformers' Trainer.

Only the drafter is trained, saved and loaded. The learning rate decays over the share of the steps
or of the time that is used, so a slower machine sees fewer rows and still ends at a rate of zero.
The best checkpoint is the one that decodes best.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl

from headstart.heads import Drafter
from headstart.heads.artifacts.files import METRICS
from headstart.heads.core import gathered, in_parts, in_shards, output_layer
from headstart.heads.core.files import flush_folder

from ..data.batches import Batches, batch_loader, read_ahead
from ..data.training_rows import Rows
from ..figures.metrics import Metrics, scalars
from ..processes.agreement import from_process_0, is_process_0, sum_over_processes, wait_for_all
from ..processes.engine import (
    TOGETHER,
    check_kind,
    describe,
    ends_of,
    keep_whole,
    kind_of,
    leave_out_frozen,
    shard_layers,
    size_buckets,
    weights_are_sharded,
)
from ..processes.memory import TRAINING, enough_memory
from ..processes.stopping import Interrupted, StopSignals
from ..recipe import Train
from .checkpoints import (
    Reached,
    Spread,
    finish_checkpoint,
    keep_only,
    last_checkpoint,
    read_checkpoint,
    whole_checkpoints,
)
from .clock import Clock, Progress, StepEnd
from .epochs import NextEpoch, make_batches, steps_of
from .feature_files import FeatureFolder
from .non_finite import NonFiniteLoss, Part, check_weights, rows_to_blame
from .on_policy import StudentText
from .revalidation import Revalidation
from .target_with_drafter import TargetWithDrafter

logger = logging.getLogger(__name__)


class DrafterTrainer(Trainer):
    """Trains the drafter of a `TargetWithDrafter`.

    Args:
        args: see `training_arguments`.
        validation: measures the drafter; its `tau` chooses the checkpoint.
        evaluation: the settings of `validation`, as plain data, by which a resumed run knows
            whether its validations compare with those before.
        progress: whether to draw a bar on stderr.
        student_text: makes, of the batches, what the drafter writes for steps to learn from.
        flops: products of a training step for each token, see `Metrics`.
        features: where the target's features are kept that do not fit in memory; None for nowhere.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        module: TargetWithDrafter,
        args: TrainingArguments,
        rows: Rows,
        spec: Train,
        validation: Callable[[Drafter], dict[str, Any]],
        progress: bool = True,
        student_text: Callable[[Batches], StudentText] | None = None,
        flops: float | None = None,
        features: FeatureFolder | None = None,
        evaluation: dict[str, Any] | None = None,
    ):
        self.module, self.rows, self.spec, self.validation = module, rows, spec, validation
        self.features, self.evaluation = features, evaluation
        self.folder = Path(args.output_dir or "")
        self.batches = make_batches(module, args, rows, spec)
        self.student_text = student_text and student_text(self.batches)
        if spec.epochs is not None:
            args.max_steps = steps_of(spec.epochs, self.batches.steps, args.max_steps)
            args.logging_steps = min(args.logging_steps, max(args.max_steps // 50, 1))
        self.clock = Clock(args.max_steps, spec.max_seconds, spec.warmup_ratio)
        self.metrics = Metrics(
            self.folder.parent / METRICS, self.clock, rows.lengths, self.batches.world,
            flops and flops * self.batches.world / args.world_size,
        )  # fmt: skip
        self.revalidation = Revalidation(self.measure, self.metrics)
        self.signals, self.stopped, self.progress = StopSignals(), False, progress
        self.loss_total = 0.0  # of all steps so far
        self.began: Sequence[float] | None = None  # see `Reached`
        self.parts: list[Part] = []  # of the coming step, on this process
        self.futures: Any = None  # an epoch's iterator, where threads read batches
        self.ahead: Iterator = iter(())  # the batches of those futures
        size_buckets(args, module.drafter.config.hidden_size)
        super().__init__(
            model=module,
            args=args,
            train_dataset=rows,
            eval_dataset=rows,  # never read: `evaluate` decodes prompts
            callbacks=[
                StepEnd(self.end_step),
                self.metrics,
                self.revalidation,
                self.clock,
                Progress(self.clock, progress),
                NextEpoch(self.batches),
            ],
        )
        self.remove_callback(PrinterCallback)  # it prints to stdout
        # Autocast keeps a copy of every weight in bfloat16 until the forward ends; not here.
        self.copies = not spec.activation_checkpointing
        given: Any = AutocastKwargs(cache_enabled=self.copies)
        self.accelerator.autocast_handler = given
        self.kind = kind_of(args, os.environ)
        check_kind(self.kind, self.accelerator.distributed_type)

    def fit(self) -> dict[str, Any]:
        """Train, going on from the last whole checkpoint, and load the best one.

        Returns:
            `steps`, `seconds`, `ran_on`, `features_cached`, `train_loss`, and of the best
            checkpoint `best_step` and what the validation measured.

        Raises:
            Interrupted: a signal has stopped it, and a checkpoint holds all that was done.
            NonFiniteLoss: earlier checkpoints are kept.
            OptionError: the last checkpoint is of a run that was spread otherwise; or see
                `enough_memory`.
        """
        if is_process_0():  # what was not written whole
            keep_only(self.folder, whole_checkpoints(self.folder))
        resume = from_process_0(last_checkpoint(self.folder))
        reached = read_checkpoint(resume, self.spread()) if resume else Reached()
        self.clock.start(reached.seconds)
        self.loss_total, self.began = reached.loss, reached.began
        if reached.evaluation != self.evaluation:
            whole, how = from_process_0(whole_checkpoints(self.folder)), self.spread()
            self.revalidation.due = {path: read_checkpoint(path, how).seconds for path in whole}
        limit = self.spec.feature_cache_mb
        cached = self.module.fill_cache(self.rows, limit, self.progress and is_process_0())
        if self.features is not None and not cached:
            together = self.is_fsdp_enabled or weights_are_sharded()
            self.module.open_files(self.features, self.rows, together)
        prepared = reached.prepared
        self.clock.prepared = from_process_0(self.clock.elapsed()) if prepared is None else prepared
        if is_process_0() and (left := self.clock.little_left()):
            logger.warning(left)
        with self.signals, enough_memory(TRAINING, self._kept):
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        self.module.release()
        if self.stopped:
            if is_process_0():
                place = self.folder / f"checkpoint-{self.state.global_step}"
                print(
                    f"headstart: stopped, with {place}; the same command continues", file=sys.stderr
                )
            raise Interrupted(128 + (self.signals.number or 0))
        best = self.state.best_global_step
        (entry,) = [e for e in self.state.log_history if e["step"] == best and "eval_tau" in e]
        measured = {n.removeprefix("eval_"): v for n, v in entry.items() if n.startswith("eval_")}
        return {
            "steps": self.state.global_step,
            "seconds": round(self.clock.seconds, 3),
            "ran_on": describe(self.args, os.environ, in_parts(self.module.target)),
            "features_cached": cached,
            "train_loss": self.loss_total / self.state.global_step,
            "best_step": best,
            **measured,
        }

    def spread(self) -> Spread:
        """How this run is spread over processes."""
        args = self.args
        batch = args.per_device_train_batch_size, args.gradient_accumulation_steps
        kind = TOGETHER if in_parts(self.module.target) else self.kind
        return Spread(kind, args.world_size, *batch)

    def agree(self, options: dict[str, Any]) -> None:
        """Agree with the other processes on the coming step's loss, the time, and whether to stop.

        `options` are those of the module's forward. A NonFiniteLoss names the rows to blame.
        """
        asked = float(self.signals.number is not None)
        own = float(sum(loss for _, loss in self.parts))
        seconds = self.clock.elapsed() if is_process_0() else 0.0
        loss, seconds, asked = sum_over_processes([own, seconds, asked], self.args.device)
        if not math.isfinite(loss):
            when = f"step {self.state.global_step + 1}"
            with gathered(*self.module.trained()):
                check_weights(self.module.trained(), when, self._kept())
            rows = rows_to_blame(self.module, self.parts, options)
            raise NonFiniteLoss(f"{when}: the loss of {rows} is not finite. {self._kept()}")
        self.parts.clear()
        self.loss_total += loss
        self.agreed = seconds, asked > 0

    def end_step(self, control: TrainerControl) -> None:
        """Act on what the processes have agreed on."""
        seconds, asked = self.agreed
        self.clock.read(self.state.global_step, seconds)
        self.stopped = asked and self.may_stop()
        if self.stopped:
            control.should_training_stop = control.should_save = True

    def _kept(self) -> str:
        last = last_checkpoint(self.folder)
        return f"{last} is kept." if last else "There is no checkpoint yet."

    def may_stop(self) -> bool:
        """Whether a run that goes on after this step does as this one would: a student's text that
        is written for several steps is not saved."""
        student = self.student_text
        return student is None or self.state.global_step % student.spec.every == 0

    def starts_at(self, group: dict[str, Any]) -> float:
        """The share of the training at which an optimizer's parameter group begins to learn."""
        return 0.0

    def forward_options(self) -> dict[str, Any]:
        """Further arguments of the module's forward in the coming step."""
        return {}

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """What weight decay shrinks: matrices, but no norms and biases, however they are named."""
        names = super().get_decay_parameter_names(model)
        decayed = {name for name, weight in model.named_parameters() if weight.ndim > 1}
        return [name for name in names if name in decayed]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.is_fsdp_enabled and not in_shards(self.module):
            shard_layers(self.module.target)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.is_deepspeed_enabled:  # its engine exists now, and its checkpoint is not yet read
            engine = self.accelerator.deepspeed_engine_wrapped.engine  # type: ignore[union-attr]
            leave_out_frozen(engine)
            keep_whole(engine, [*self.module.trained(), output_layer(self.module.target)])
        optimizer = optimizer or self.optimizer
        starts = [self.starts_at(group) for group in optimizer.param_groups]
        factors = [partial(self.clock.factor, since=start) for start in starts]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate, which would divide among the processes what is divided."""
        workers, pin = self.spec.dataloader_workers, self.args.dataloader_pin_memory
        return batch_loader(self.rows, self.batches, workers, pin)

    def _run_epoch(self, **epoch: Any) -> None:  # type: ignore[override]
        """Not where a resumed run has nothing left to do: the loop would take one more step."""
        if not self.control.should_training_stop:
            super()._run_epoch(**epoch)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor]:
        batches = list(itertools.islice(self._batches_of(epoch_iterator), num_batches))
        if self.student_text is not None:
            batches = self.student_text.in_place_of(batches, self.state.global_step)
        self.metrics.count(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def _batches_of(self, epoch_iterator: Iterator) -> Iterator:
        """The batches of an epoch, whose iterator gives futures where threads read them."""
        workers = self.spec.dataloader_workers
        if not workers:
            return epoch_iterator
        if self.futures is not epoch_iterator:
            self.futures = epoch_iterator
            pin = self.args.dataloader_pin_memory
            self.ahead = read_ahead(epoch_iterator, 2 * workers, pin)
        return self.ahead

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """See `TargetWithDrafter.counts`: over one step's micro-batches of all processes."""
        self.module.step = self.state.global_step
        names = ("tokens", "supervised", "segments")
        batches = [{n: b[n].to(device) for n in names if n in b} for b in batch_samples]
        counts = sum(self.module.counts(**batch) for batch in batches)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts  # type: ignore[return-value]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        options = {"counts": num_items_in_batch, **self.forward_options()}
        place, own = self.args.device.type, getattr(self.args, "own_autocast", False)
        with torch.autocast(place, torch.bfloat16, enabled=own, cache_enabled=self.copies):
            outputs = model(**inputs, **options)
        self.parts.append((inputs, outputs["loss"].detach()))
        self.metrics.add(outputs["by_depth"], outputs["hits"], inputs["rows"] is None)
        if self.accelerator.sync_gradients:  # before the gradients are used
            self.agree(options)
        # The counts are those of all processes, and their gradients are averaged, not summed.
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what was measured of the speed too, for `metrics.jsonl` and all trackers."""
        measured = scalars(self.metrics.measured()) if "loss" in logs else {}
        super().log(logs | measured, *args, **kwargs)

    def measure(self, checkpoint: Path | None = None) -> dict[str, Any]:
        """What the validation says, of a checkpoint's weights if given, which stay loaded."""
        if checkpoint is not None:
            self._load_from_checkpoint(str(checkpoint))
        with gathered(self.module.drafter, *ends_of(self.module.target)):
            measured = from_process_0(self.validation(self.module.drafter))
        return {f"eval_{name}": value for name, value in measured.items()}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Decode the validation prompts; every process does, and process 0's figures count."""
        metrics = self.measure()
        self.log(scalars(metrics))
        entry: dict[str, Any] = {"step": self.state.global_step} | metrics
        self.state.log_history[-1] = entry
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter alone."""
        with gathered(*self.module.trained()):
            if self.args.should_save:
                self.module.drafter.save_checkpoint(Path(output_dir or self.folder))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with gathered(*self.module.trained()):
            when = f"after step {self.state.global_step}"
            check_weights(self.module.trained(), when, self._kept())
        super()._save_checkpoint(model, trial)
        folder = self.folder / f"checkpoint-{self.state.global_step}"
        wait_for_all()  # every process has written its part
        if self.args.local_process_index == 0:
            flush_folder(folder)
        wait_for_all()
        if self.args.should_save:
            known = self.clock.seconds, self.loss_total, self.clock.prepared
            reached = Reached(*known, self.began, self.evaluation)
            finish_checkpoint(folder, self.spread(), reached)
            keep_only(self.folder, [folder, Path(self.state.best_model_checkpoint or folder)])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        # transformers would save the target too.
        torch.save(self.optimizer.state_dict(), self._shard_of_optimizer(output_dir))  # type: ignore[union-attr]
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        file = self._shard_of_optimizer(checkpoint)
        self.optimizer.load_state_dict(torch.load(file, weights_only=False))  # type: ignore[union-attr]
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt"))

    def _shard_of_optimizer(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"optimizer-{self.args.process_index}.pt"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with gathered(*self.module.trained(), write=True):
            self.module.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if not self.stopped:
            assert self.state.best_model_checkpoint is not None
            self._load_from_checkpoint(self.state.best_model_checkpoint)
