"""Trains a drafter on a frozen target: a thin subclass of transformers' Trainer.

Only the drafter is trained, saved and loaded. The learning rate decays over the share of the steps
or of the time that is used, so a slower machine sees fewer rows and still ends at a rate of zero.
The best checkpoint is the one that decodes best.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from headstart.heads import Drafter
from headstart.heads.artifacts.files import WEIGHTS
from headstart.heads.core.files import write_atomically

from .clock import Clock, Progress
from .data.batches import collate
from .data.training_rows import Rows
from .on_policy import StudentText
from .processes import from_process_0, wait_for_all
from .recipe import Train
from .target_with_drafter import TargetWithDrafter

_COMPLETE = "complete.json"  # written last into a checkpoint: seconds of training so far


class DrafterTrainer(Trainer):
    """Trains the drafter of a `TargetWithDrafter`.

    Args:
        args: see `training_arguments`.
        validation: measures the drafter; its `tau` chooses the checkpoint.
        progress: whether to draw a bar on stderr.
        student_text: the text that the drafter writes itself, for the steps that learn from it.
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
        student_text: StudentText | None = None,
    ):
        self.module, self.rows, self.spec, self.validation = module, rows, spec, validation
        self.student_text = student_text
        self.folder = Path(args.output_dir or "")
        self.clock = Clock(args.max_steps, spec.max_seconds, spec.warmup_ratio)
        super().__init__(
            model=module,
            args=args,
            train_dataset=rows,
            eval_dataset=rows,  # never read: `evaluate` decodes prompts
            data_collator=collate,
            callbacks=[self.clock, Progress(self.clock, progress)],
        )
        self.remove_callback(PrinterCallback)  # it prints to stdout

    def fit(self) -> dict[str, Any]:
        """Train, going on from the last whole checkpoint, and load the best one.

        Returns:
            `steps`, `seconds`, `features_cached`, `train_loss`, and of the best checkpoint
            `best_step` and what the validation measured.
        """
        resume = last_checkpoint(self.folder)
        self.clock.start(json.loads((resume / _COMPLETE).read_text()) if resume else 0.0)
        cached = self.module.fill_cache(self.rows, self.spec.feature_cache_mb)
        output = self.train(resume_from_checkpoint=str(resume) if resume else None)
        self.module.release()
        best = self.state.best_global_step
        (entry,) = [e for e in self.state.log_history if e["step"] == best and "eval_tau" in e]
        measured = {n.removeprefix("eval_"): v for n, v in entry.items() if n.startswith("eval_")}
        return {
            "steps": self.state.global_step,
            "seconds": round(self.clock.seconds, 3),
            "features_cached": cached,
            "train_loss": output.training_loss,
            "best_step": best,
            **measured,
        }

    def starts_at(self, group: dict[str, Any]) -> float:
        """The share of the training at which an optimizer's parameter group begins to learn."""
        return 0.0

    def forward_options(self) -> dict[str, Any]:
        """Further arguments of the module's forward in the coming step."""
        return {}

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = optimizer or self.optimizer
        starts = [self.starts_at(group) for group in optimizer.param_groups]
        factors = [partial(self.clock.factor, since=start) for start in starts]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor]:
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if self.student_text is not None:
            batches = self.student_text.in_place_of(batches, self.state.global_step)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """See `TargetWithDrafter.counts`: over one step's micro-batches of all processes."""
        names = ("tokens", "supervised", "segments")
        batches = [{n: b[n].to(device) for n in names if n in b} for b in batch_samples]
        counts = sum(self.module.counts(**batch) for batch in batches)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts  # type: ignore[return-value]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, counts=num_items_in_batch, **self.forward_options())
        # The counts are those of all processes, and their gradients are averaged, not summed.
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Decode the validation prompts; every process does, and process 0's figures count."""
        measured = from_process_0(self.validation(self.module.drafter))
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter alone."""
        if self.args.should_save:
            self.module.drafter.save_pretrained(output_dir or self.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        wait_for_all()  # every process has written its random state
        if self.args.should_save:
            folder = self.folder / f"checkpoint-{self.state.global_step}"
            write_atomically(folder / _COMPLETE, json.dumps(self.clock.seconds).encode())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = safetensors.torch.load_file(Path(resume_from_checkpoint) / WEIGHTS)
        self.module.drafter.load_state_dict(weights)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written whole, or None."""
    whole = [file.parent for file in folder.glob(f"checkpoint-*/{_COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
