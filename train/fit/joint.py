"""Trains a drafter and its target together (Medusa-2, arXiv 2401.10774, section 2.2.2).

The target learns through a LoRA adapter. Its teacher is the same model with the adapter disabled,
and the divergence from that teacher is its own loss, beside the drafter's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerControl

from headstart.heads import Drafter, TrainableDrafter
from headstart.heads.core import decoder_layers, gathered, in_shards, output_layer
from headstart.heads.parts.adapter import Adapter
from headstart.heads.parts.recompute import compute_again
from headstart.heads.trainable import DraftLogits

from ..losses import LOSSES
from ..losses.comparisons import SoftLabels, rows_at_once
from ..losses.draft_loss import zero_with_gradient
from ..losses.fused import summed_loss
from ..losses.teacher import Teacher
from ..processes.agreement import in_parallel
from ..processes.engine import forget_steps
from ..recipe import Train
from .target_with_drafter import TargetWithDrafter
from .trainer import DrafterTrainer

logger = logging.getLogger(__name__)


def drafter_weight(config: Any, share: float, since: float | None = None) -> float | None:
    """λ, the weight of the drafter's loss at a share of the training; None while it learns alone.

    Args:
        config: of a drafter with an adapter: `heads_first`, `head_weight` and `ramp`. In the second
            stage λ is λ0, or λ0 sin(πs/2) at share s of that stage.
        since: the share at which the second stage begins; `heads_first` when None.

    >>> from headstart.heads.medusa2 import Medusa2Config
    >>> config = Medusa2Config(heads_first=0.5, head_weight=0.2, ramp="sine")
    >>> drafter_weight(config, 0.25), drafter_weight(config, 0.5), drafter_weight(config, 1.0)
    (None, 0.0, 0.2)
    """
    since = float(config.heads_first) if since is None else since
    if share < since:
        return None
    if config.ramp == "constant":
        return config.head_weight
    stage = (share - since) / (1 - since)
    return config.head_weight * math.sin(math.pi / 2 * stage)


class JointTarget(TargetWithDrafter):
    """A `TargetWithDrafter` whose target gets an adapter here, and keeps it after training.

    Cached features are those of the base, the target without adapter.
    """

    needs_final = True

    def __init__(self, target: PreTrainedModel, drafter: TrainableDrafter, *args: Any):
        base = Teacher(target)  # holds the output layer as it is without adapter
        super().__init__(target, drafter, *args)
        assert drafter.adapter is not None
        self.base, self.adapter = base, drafter.adapter
        self._undo: list[Callable[[], None]] = []
        if left_out := self.adapter.left_out(target):
            logger.warning("%s", left_out)
        self.adapter.attach(target)

    def whole_loss(self, captured: Tensor, *batch: Any, weight: float | None = None) -> Tensor:
        """See `TargetWithDrafter.whole_loss`; the features are those of the base.

        The drafter's loss has `weight` beside the target's own. When that is None the drafter
        learns alone, from the features of the base.
        """
        if weight is None:
            loss = self.draft_loss(captured, captured, *batch)
            if in_parallel() and not in_shards(self):  # which wait for no gradient
                loss = loss + zero_with_gradient(self.adapter.parameters())
            return loss
        tokens, supervised, counts, segments, positions = batch
        adapted = self.run_target(tokens, positions)
        loss = weight * self.draft_loss(adapted, captured, *batch)
        where, final = target_positions(supervised, segments), self.final
        both = captured[..., final][where], adapted[..., final][where]
        return loss + base_kl(self.base, output_layer(self.target), *both, counts[-1])

    def checkpoint_activations(self) -> None:
        """Of the target's layers, through which the adapter's gradients flow."""
        self._undo.append(compute_again(decoder_layers(self.target)))

    def release(self) -> None:
        super().release()
        while self._undo:
            self._undo.pop()()

    def counts(self, tokens: Tensor, supervised: Tensor, segments: Tensor | None = None) -> Tensor:
        """How many labels each depth has, and last the target itself.  # [K + 1]"""
        own = target_positions(supervised, segments).sum().view(1)
        return torch.cat([super().counts(tokens, supervised, segments), own])

    def trained(self) -> list[nn.Module]:
        return [self.drafter, *self.adapter.factors()]

    def stages(self) -> list[tuple[float, dict[str, Any]]]:
        """The drafter alone, then with the adapter; without a stage that has no share."""
        config: Any = self.drafter.config
        alone = float(config.heads_first)
        both = (alone, {"weight": None}), (1 - alone, {"weight": config.head_weight})
        return [(share, options) for share, options in both if share]

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.adapter.load(folder)  # saved beside the drafter's weights

    @torch.no_grad()
    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        with self.adapter.disabled():
            return self.run_target(tokens, positions)


class JointTrainer(DrafterTrainer):
    """Trains a `JointTarget`: the drafter alone, then drafter and adapter.

    A longer training (`train.extend`) whose earlier one had begun the second stage stays in it.
    """

    module: JointTarget

    def forward_options(self) -> dict[str, Any]:
        share = self.clock.at(self.state.global_step)
        return {"weight": drafter_weight(self.module.drafter.config, share, self._second_stage())}

    def starts_at(self, group: dict[str, Any]) -> float:
        return self._second_stage() if group["adapter"] else 0.0

    def _second_stage(self) -> float:
        """The share of the training at which the second stage begins, or has begun.

        Where a shorter schedule began it, that step is an earlier share of this one.
        """
        config: Any = self.module.drafter.config
        if self.began is None:
            return config.heads_first
        return min(config.heads_first, self.clock.at(*self.began))

    def create_optimizer(self, model: Any = None) -> Any:
        """Give the adapter parameter groups of its own, marked `adapter`.

        The recipe's learning rate is the adapter's; the drafter's is `head_rate` times it.
        """
        if self.optimizer is not None:
            return self.optimizer
        optimizer: Any = super().create_optimizer(model)
        adapter = {id(parameter) for parameter in self.module.adapter.parameters()}
        config: Any = self.module.drafter.config
        groups = []
        for group in optimizer.param_groups:
            for adapted, rate in ((False, config.head_rate), (True, 1.0)):
                if chosen := [p for p in group["params"] if (id(p) in adapter) == adapted]:
                    own = {"params": chosen, "lr": group["lr"] * rate, "adapter": adapted}
                    groups.append(group | own)
        optimizer.param_groups[:] = groups
        optimizer.register_step_pre_hook(self._drop_waiting_gradients)
        return optimizer

    def _drop_waiting_gradients(self, *args: Any) -> None:
        """While the drafter learns alone, remove the adapter's gradients, which are zeros or None.

        Adam would count them as steps, and then make the first real steps several times too long.
        """
        if self.forward_options()["weight"] is None:
            for parameter in self.module.adapter.parameters():
                parameter.grad = None

    def agree(self, options: dict[str, Any]) -> None:
        self.waiting = options["weight"] is None
        if not self.waiting and self.began is None:
            self.began = self.state.global_step, self.clock.seconds
        super().agree(options)

    def end_step(self, control: TrainerControl) -> None:
        # DeepSpeed's optimizer steps on shards, not on the parameters above.
        if self.is_deepspeed_enabled and self.waiting:
            forget_steps(self.optimizer, lambda group: group["adapter"])
        super().end_step(control)


def training_classes(drafter: Drafter) -> tuple[type[TargetWithDrafter], type[DrafterTrainer]]:
    """The module and the trainer of a drafter: joint ones if its target is trained with it."""
    if drafter.adapter is None:
        return TargetWithDrafter, DrafterTrainer
    return JointTarget, JointTrainer


def training_module(
    train: Train, target: PreTrainedModel, drafter: TrainableDrafter
) -> TargetWithDrafter:
    """The module of a drafter, with the loss that a recipe's `train` section asks for."""
    kind, _ = training_classes(drafter)
    return kind(
        target, drafter, train.head_decay, train.loss, train.feature_weight,
        train.position_weights,
    )  # fmt: skip


def target_positions(supervised: Tensor, segments: Tensor | None = None) -> Tensor:
    """The positions at which the target's own next token is supervised: [B, T] -> [B, T] bool.

    That token is of the same document, where there are `segments`, see `head_labels`.
    """
    next_one = functional.pad(supervised[:, 1:], (0, 1), value=False)
    if segments is None:
        return next_one
    return next_one & (functional.pad(segments[:, 1:], (0, 1), value=-1) == segments)


def base_kl(
    teacher: Teacher,
    layer: nn.Module,
    base: Tensor,
    adapted: Tensor,
    count: Tensor,
    size: int | None = None,
) -> Tensor:
    """The mean KL(base ‖ adapted) in nats a position, Medusa-2's self-distillation loss.

    Args:
        teacher: the base's, over the whole vocabulary.
        layer: the adapted target's output layer.
        base, adapted: [M, D], the final features without and with the adapter.
        count: scalar, the positions of the whole optimizer step.
        size: see `rows_at_once`; as it says when None.
    """
    loss, own = LOSSES["forward_kl"], teacher.output.layer
    size = size or rows_at_once(loss, own.out_features, base.device)
    places = torch.arange(len(base), device=base.device).unsqueeze(0)
    kl = SoftLabels(loss, teacher, base, places, torch.zeros_like(places), size)  # all count
    factors = (1 / count.clamp(min=1)).to(torch.promote_types(adapted.dtype, torch.float32))
    output = DraftLogits(partial(teacher.logits, layer), (layer,))
    with gathered(own):  # read as often as this process has chunks
        if not len(base):
            return adapted.sum() * 0.0
        return summed_loss([output], adapted.unsqueeze(0), factors.view(1), kl)[0]


def adapter_loss_change(
    target: PreTrainedModel, adapter: Adapter, texts: Sequence[Tensor]
) -> dict[str, Any]:
    """The target's `text_loss` as `base` and, with the adapter, `adapted`; `tokens` predicted."""
    with adapter.disabled():
        base = text_loss(target, texts)
    tokens = sum(len(text) - 1 for text in texts)
    return {"base": base, "adapted": text_loss(target, texts), "tokens": tokens}


@torch.no_grad()
def text_loss(target: PreTrainedModel, texts: Sequence[Tensor]) -> float:
    """A model's mean loss on texts [P] of equal length, in nats a token."""
    nats = 0.0
    for batch in torch.stack(list(texts)).to(target.device).split(16):
        nats += float(target(input_ids=batch, labels=batch, use_cache=False).loss) * len(batch)
    return nats / len(texts)
