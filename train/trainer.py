"""Drafters on a frozen target, trained by a thin subclass of transformers' Trainer.

Target and drafter sit in one module, so data-parallel wrappers see one model; only the drafter is
trained, saved and loaded, and with it the adapter of a drafter that has its target learn too.
Training is bounded by steps and by time, and the learning rate decays
over the elapsed share of whichever bound is nearer, so a slower machine sees fewer rows and still
ends at a learning rate of zero. The best checkpoint is the one that decodes best.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from headstart.heads import FINAL, Drafter, OptionError, TrainableDrafter
from headstart.heads.core import FeatureTap, output_layer

from .clock import Bounds, Clock, Progress
from .data.training_rows import Rows
from .joint import Waiting, check_bitsandbytes, split_groups
from .losses import LOSSES, Teacher, draft_loss, drift, head_labels, label_counts
from .on_policy import StudentText
from .recipe import Train
from .stages import write_atomically

_COMPLETE = "complete.json"  # written last into a checkpoint: seconds of training so far
_WEIGHTS = "model.safetensors"
_CACHE_ROWS = 16  # rows a forward while filling the feature cache


def training_arguments(spec: Train, folder: Path, seed: int, **changes: Any) -> TrainingArguments:
    """The recipe's train section as TrainingArguments; `changes` override single ones.

    Making them also sets up the processes, which must happen before anything else asks for those.

    Raises:
        OptionError: an 8-bit optimizer without bitsandbytes.
    """
    if spec.optimizer == "adamw_8bit":
        check_bitsandbytes("train.optimizer=adamw_8bit", "train.optimizer=adamw")
        changes = {"optim": "adamw_bnb_8bit", **changes}
    gpu = torch.cuda.is_available()
    every = spec.eval_every or spec.max_steps
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": spec.max_steps,
        "learning_rate": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.clip,
        "per_device_train_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation,
        "seed": seed,
        "use_cpu": not gpu,
        # Products alone: weights, gradients and the optimizer's state stay float32.
        "bf16": gpu and torch.cuda.is_bf16_supported(),
        "dataloader_pin_memory": gpu,
        "eval_strategy": "steps",
        "eval_steps": every,
        "save_strategy": "steps",
        "save_steps": every,
        "save_total_limit": 2,  # the best and the last
        "load_best_model_at_end": True,
        "metric_for_best_model": "tau",
        "greater_is_better": True,
        "logging_steps": 25,
        "logging_nan_inf_filter": False,  # it reads the loss from the device at every step
        "remove_unused_columns": False,
        "label_names": ["tokens"],
        "prediction_loss_only": True,
        "ddp_find_unused_parameters": False,
        "ddp_timeout": 24 * 3600,  # processes wait for stages that one of them does alone
        "report_to": "none",
        "log_level": "error",
        "disable_tqdm": True,  # the bar of `Progress` knows about the time bound
    }
    args = TrainingArguments(**settings | changes)
    args._n_gpu = min(args.n_gpu, 1)  # without a launcher take one GPU, instead of DataParallel
    return args


class DraftedTarget(nn.Module):
    """The frozen target and the drafter that is trained on it, as one module.

    A drafter with an `adapter` has it put into the target, where it stays after training.

    Args:
        head_decay: the weight of depth k in the loss is head_decay**k.
        loss: one of `LOSSES`.
        feature_weight: see `draft_loss`.

    Raises:
        OptionError: a drafter that is not trained, or a loss that the target cannot teach, or that
            asks the drafter for features that it does not foretell.
    """

    accepts_loss_kwargs = True  # the loss is scaled for gradient accumulation already

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: TrainableDrafter,
        head_decay: float,
        loss: str = "cross_entropy",
        feature_weight: float = 0.0,
    ):
        super().__init__()
        if not drafter.trainable:
            raise OptionError(
                f"{type(drafter).__name__} has nothing to train; decode with it as it is."
            )
        self.target = target.requires_grad_(False).eval()
        self.drafter = drafter
        self.head_decay, self.loss, self.feature_weight = head_decay, loss, feature_weight
        self.teacher = self.base = self.final = None
        layers = list(drafter.config.feature_layers)
        self.size = target.config.get_text_config(decoder=True).hidden_size
        self.width = len(layers) * self.size  # F, what the drafter reads
        if LOSSES[loss] is not None:
            self.teacher = Teacher(target, drafter.draft_vocabulary)
        if drafter.adapter is not None:
            self.base = Teacher(target)  # holds on to the output layer as it is now
        if feature_weight and drafter.predicted_features(torch.empty(0, 0, self.size)) is None:
            raise OptionError(
                f"train.feature_weight is {feature_weight}, and {type(drafter).__name__} foretells "
                "no features that the target's could be compared with; set it to 0."
            )
        if self.teacher or self.base or feature_weight:
            layers = layers if FINAL in layers else [*layers, FINAL]
            self.final = layers.index(FINAL) * self.size
        self.captured = len(layers) * self.size
        self.tap = FeatureTap(target, layers) if layers else None
        self.cache: Tensor | None = None
        if drafter.adapter is not None:
            drafter.adapter.attach(target)

    def train(self, mode: bool = True) -> DraftedTarget:
        """Only the drafter ever trains, and its adapter; the target's own dropout stays off."""
        self.training = mode
        self.drafter.train(mode)
        return self

    def forward(
        self,
        rows: Tensor | None,
        tokens: Tensor,
        supervised: Tensor,
        counts: Tensor | None = None,
        weight: float | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a batch: tokens [B, T], supervised [B, T] bool.

        Args:
            rows: [B], their numbers among those that were cached; None for any other text.
            counts: see `counts`, those of the whole step; this batch's when None.
            weight: of the drafter's loss beside the target's own, both of which then reach the
                target's adapter; when None the drafter learns alone.
        """
        labels = self.labels(tokens, supervised)  # [K, B, T]
        captured = (
            self.features(tokens) if self.cache is None or rows is None else self.cache[rows]
        )  # [B, T, C]
        counts = self.counts(tokens, supervised) if counts is None else counts
        final = None  # what the target without adapter says, [B, T, D]
        if self.final is not None:
            final = captured[..., self.final : self.final + self.size]
        if weight is not None:
            captured = self._run(tokens)
        features = captured[..., : self.width]  # [B, T, F]
        loss = draft_loss(
            self.drafter, features, tokens, labels, counts,
            self.head_decay, self.loss, self.teacher, final, feature_weight=self.feature_weight,
        )  # fmt: skip
        if weight is not None and self.base is not None and final is not None:
            assert self.final is not None
            adapted = captured[..., self.final : self.final + self.size]
            where = _spoken(supervised)
            layer = output_layer(self.target)
            moved = drift(self.base, layer, final[where], adapted[where], counts[-1])
            loss = weight * loss + moved
        if self.drafter.adapter is not None and weight is None and _in_parallel():
            # Every parameter must be reached, or data-parallel training waits for it.
            loss = loss + sum(p.float().sum() * 0.0 for p in self.drafter.adapter.parameters())
        return {"loss": loss}

    def labels(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """See `head_labels`."""
        drafter = self.drafter
        return head_labels(tokens, supervised, drafter.train_depths, drafter.draft_vocabulary)

    def counts(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """How many labels a batch has: those of each depth, [K], and last the target's own."""
        counts = label_counts(self.labels(tokens, supervised))
        return torch.cat([counts, _spoken(supervised).sum().view(1)])

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """What is read of the target, without adapter, at tokens [B, T]; see `_run`."""
        adapter = self.drafter.adapter
        with contextlib.nullcontext() if adapter is None else adapter.off():
            return self._run(tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        """Run the target on tokens [B, T], but not its output layer.

        The drafter's features, and after them the final one where only the loss asks for it; rows
        are padded on the right, where causal attention keeps the padding out of sight.  # [B, T, C]
        """
        if self.tap is None:
            return torch.empty(*tokens.shape, 0, device=tokens.device)
        # The drafter will meet features of the target's own precision.
        with torch.autocast(tokens.device.type, enabled=False):
            self.target.get_decoder()(input_ids=tokens, use_cache=False)
        return self.tap.take()

    def fill_cache(self, rows: Rows, limit: float) -> bool:
        """Keep the features of all rows if they take at most `limit` MB; says whether they do."""
        megabytes = rows.tokens.numel() * self.captured * self.target.dtype.itemsize / 1e6
        if megabytes > limit:
            return False
        # Always in the same batches, so that a resumed run reads the very same numbers.
        parts = rows.tokens.to(self.target.device).long().split(_CACHE_ROWS)
        self.cache = torch.cat([self.features(part) for part in parts])
        return True

    def release(self) -> None:
        """Let go of the cache and of the hooks on the target; an adapter stays in it."""
        self.cache = None
        if self.tap is not None:
            self.tap.close()


def _in_parallel() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _spoken(supervised: Tensor) -> Tensor:
    """Where the target's own next token is a label: supervised [B, T] -> [B, T]."""
    return functional.pad(supervised[:, 1:], (0, 1), value=False)


class DrafterTrainer(Trainer):
    """Trains the drafter of a `DraftedTarget`.

    Args:
        model: target and drafter.
        args: see `training_arguments`.
        rows: what the target wrote.
        spec: the recipe's train section.
        validation: measures the drafter; its `tau` chooses the checkpoint.
        progress: whether to draw a bar on stderr.
        student_text: the text that the drafter writes itself, for the steps that learn from it.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: DraftedTarget,
        args: TrainingArguments,
        rows: Rows,
        spec: Train,
        validation: Callable[[Drafter], dict[str, Any]],
        progress: bool = True,
        student_text: StudentText | None = None,
    ):
        self.pair, self.rows, self.spec, self.validation = model, rows, spec, validation
        self.student_text = student_text
        self.folder = Path(args.output_dir or "")
        self.clock = Clock(args.max_steps, spec.max_seconds, spec.warmup_ratio)
        super().__init__(
            model=model,
            args=args,
            train_dataset=rows,
            eval_dataset=rows,  # never read: `evaluate` decodes prompts
            callbacks=[Bounds(self.clock), Progress(self.clock, progress)],
        )
        self.remove_callback(PrinterCallback)  # it prints to stdout
        if model.drafter.adapter is not None:
            self.add_callback(Waiting(model.drafter.adapter, self.clock))

    def fit(self) -> dict[str, Any]:
        """Train, going on from the last whole checkpoint, and load the best one.

        Returns:
            `steps`, `seconds`, `features_cached`, `train_loss`, and of the best checkpoint
            `best_step` and what the validation measured.
        """
        resume = last_checkpoint(self.folder)
        self.clock.start(_seconds(resume) if resume else 0.0)
        cached = self.pair.fill_cache(self.rows, self.spec.feature_cache_mb)
        output = self.train(resume_from_checkpoint=str(resume) if resume else None)
        self.pair.release()
        best = self.state.best_global_step
        assert best is not None
        return {
            "steps": self.state.global_step,
            "seconds": round(self.clock.seconds, 3),
            "features_cached": cached,
            "train_loss": output.training_loss,
            "best_step": best,
            **_validation_at(self.state.log_history, best),
        }

    def create_optimizer(self, model: Any = None) -> Any:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        adapter = self.pair.drafter.adapter
        if adapter is not None and fresh:
            split_groups(optimizer, adapter)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        chosen: Any = optimizer or self.optimizer
        adapter = self.pair.drafter.adapter
        factors = []
        for group in chosen.param_groups:
            late = adapter is not None and group.get("adapter", False)
            since = adapter.schedule.heads_first if adapter is not None and late else 0.0
            # A plain function, which is not saved.
            factors.append(lambda step, since=since: self.clock.factor(step, since))
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, factors)
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
        """Labels in the micro-batches of one step, of all processes.  # [K + 1]"""
        counts = sum(
            self.pair.counts(b["tokens"].to(device), b["supervised"].to(device))
            for b in batch_samples
        )
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts  # type: ignore[return-value]

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        adapter, weight = self.pair.drafter.adapter, None
        if adapter is not None:
            weight = adapter.schedule.weight_at(self.clock.at(self.state.global_step))
        outputs = model(**inputs, counts=num_items_in_batch, weight=weight)
        # The counts are those of all processes, and their gradients are averaged, not summed.
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Decode the validation prompts; every process does, and process 0's figures count."""
        measured = self.validation(self.pair.drafter)
        if self.args.world_size > 1:
            told = [measured]
            torch.distributed.broadcast_object_list(told, src=0)
            measured = told[0]
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter alone, with its adapter if it has one."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            self.pair.drafter.save_pretrained(output_dir or self.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.world_size > 1:
            torch.distributed.barrier()  # every process has written its random state
        if self.args.should_save:
            folder = self.folder / f"checkpoint-{self.state.global_step}"
            write_atomically(folder / _COMPLETE, json.dumps(self.clock.seconds).encode())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = safetensors.torch.load_file(Path(resume_from_checkpoint) / _WEIGHTS)
        self.pair.drafter.load_state_dict(weights)
        if (adapter := self.pair.drafter.adapter) is not None:
            adapter.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written whole, or None."""
    whole = [file.parent for file in folder.glob(f"checkpoint-*/{_COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def _seconds(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / _COMPLETE).read_text()))


def _validation_at(history: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """What the validation measured at a step, from the trainer's log."""
    (entry,) = [e for e in history if e["step"] == step and "eval_tau" in e]
    return {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
