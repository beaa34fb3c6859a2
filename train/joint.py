"""Trains a drafter and its target together (Medusa-2, arXiv 2401.10774, section 2.2.2).

The target learns through a LoRA adapter. Its teacher is the same model with the adapter disabled,
and the divergence from that teacher is its own loss, beside the drafter's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from headstart.heads import Drafter, DrafterConfig
from headstart.heads.core import output_layer
from headstart.heads.parts.adapter import Adapter

from .clock import Clock
from .losses.base_kl import base_kl
from .losses.draft_loss import zero_with_gradient
from .losses.labels import target_positions
from .losses.teacher import Teacher
from .processes import in_parallel
from .target_with_drafter import TargetWithDrafter
from .trainer import DrafterTrainer

_BATCH = 16  # texts a forward


@dataclass(frozen=True)
class Schedule:
    """The two stages of joint training: the drafter alone, then drafter and adapter.

    Attributes:
        heads_first: share of the training that the first stage takes.
        weight: λ0, of the drafter's loss beside the target's own in the second stage.
        ramp: `constant`; or `sine`, λ0 sin(πs/2) at share s of the second stage.
        head_rate: the drafter's learning rate, as a multiple of the adapter's.
    """

    heads_first: float
    weight: float
    ramp: str
    head_rate: float

    @classmethod
    def of(cls, config: DrafterConfig | Any) -> Self:
        """The schedule that the config of a drafter with an adapter describes."""
        return cls(config.heads_first, config.head_weight, config.ramp, config.head_rate)

    def weight_at(self, share: float) -> float | None:
        """λ at a share of the training; None in the first stage.

        >>> schedule = Schedule(heads_first=0.5, weight=0.2, ramp="sine", head_rate=4.0)
        >>> schedule.weight_at(0.25), schedule.weight_at(0.5), round(schedule.weight_at(1.0), 3)
        (None, 0.0, 0.2)
        """
        if share < self.heads_first:
            return None
        if self.ramp == "constant":
            return self.weight
        stage = (share - self.heads_first) / (1 - self.heads_first)
        return self.weight * math.sin(math.pi / 2 * stage)


class JointTarget(TargetWithDrafter):
    """A target with an adapter, and the drafter that is trained with it.

    The adapter is put into the target here, and stays there after training. Cached features are
    those of the base, the target without adapter.

    Args, Raises: see `TargetWithDrafter`.
    """

    needs_final_features = True
    dropout_in_output_layer = True  # the adapter's, where it adapts that layer

    def __init__(self, target: PreTrainedModel, drafter: Drafter, *args: Any, **options: Any):
        base = Teacher(target)  # holds the output layer as it is without adapter
        super().__init__(target, drafter, *args, **options)
        assert drafter.adapter is not None
        self.base, self.adapter = base, drafter.adapter
        self.adapter.attach(target)

    def forward(
        self,
        rows: Tensor | None,
        tokens: Tensor,
        supervised: Tensor,
        counts: Tensor | None = None,
        weight: float | None = None,
    ) -> dict[str, Tensor]:
        """See `TargetWithDrafter.forward`.

        Args:
            weight: of the drafter's loss beside the target's own. When None the drafter learns
                alone, from the features of the base.
        """
        base = self.read(rows, tokens)  # [B, T, C]
        counts = self.counts(tokens, supervised) if counts is None else counts
        if weight is None:
            loss = self.draft_loss(base, base, tokens, supervised, counts)
            if in_parallel():
                loss = loss + zero_with_gradient(self.adapter.parameters())
            return {"loss": loss}
        adapted = self.run_target(tokens)
        loss = weight * self.draft_loss(adapted, base, tokens, supervised, counts)
        where, final = target_positions(supervised), self.final
        layer = output_layer(self.target)
        moved = base_kl(
            self.base, layer, base[..., final][where], adapted[..., final][where], counts[-1]
        )
        return {"loss": loss + moved}

    def counts(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """How many labels a batch has: of each depth, and last of the target itself.  # [K + 1]"""
        own = target_positions(supervised).sum().view(1)
        return torch.cat([super().counts(tokens, supervised), own])

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """See `run_target`; of the base, without a gradient."""
        with self.adapter.disabled():
            return self.run_target(tokens)


class JointTrainer(DrafterTrainer):
    """Trains a `JointTarget`: drafter and adapter, by the schedule in the drafter's config.

    Args: see `DrafterTrainer`.
    """

    module: JointTarget

    def __init__(self, module: JointTarget, *args: Any, **options: Any):
        self.adapter, self.schedule = module.adapter, Schedule.of(module.drafter.config)
        super().__init__(module, *args, **options)
        self.add_callback(_SkipWaitingAdapter(self.adapter, self.schedule, self.clock))

    def forward_options(self) -> dict[str, Any]:
        return {"weight": self.schedule.weight_at(self.clock.at(self.state.global_step))}

    def create_optimizer(self, model: Any = None) -> Any:
        """Give the adapter parameter groups of its own, marked `adapter`.

        The recipe's learning rate is the adapter's; the drafter's is `head_rate` times it.
        """
        fresh = self.optimizer is None
        optimizer: Any = super().create_optimizer(model)
        if fresh:
            adapter = {id(parameter) for parameter in self.adapter.parameters()}
            groups = []
            for group in optimizer.param_groups:
                for adapted in (False, True):
                    chosen = [p for p in group["params"] if (id(p) in adapter) == adapted]
                    rate = group["lr"] * (1.0 if adapted else self.schedule.head_rate)
                    if chosen:
                        groups.append({**group, "params": chosen, "lr": rate, "adapter": adapted})
            optimizer.param_groups[:] = groups
        return optimizer

    def starts_at(self, group: dict[str, Any]) -> float:
        return self.schedule.heads_first if group.get("adapter", False) else 0.0

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.adapter.load(Path(resume_from_checkpoint))  # the drafter saves it beside its weights


class _SkipWaitingAdapter(TrainerCallback):
    """Removes the adapter's gradients, all zeros, while the drafter learns alone.

    Adam would count them as steps, and its bias correction would then make the first real ones
    several times as long as the learning rate says.
    """

    def __init__(self, adapter: Adapter, schedule: Schedule, clock: Clock):
        self.adapter, self.schedule, self.clock = adapter, schedule, clock

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.schedule.weight_at(self.clock.at(state.global_step)) is None:
            for parameter in self.adapter.parameters():
                parameter.grad = None


def adapter_loss_change(
    target: PreTrainedModel, adapter: Adapter, texts: Sequence[Tensor]
) -> dict[str, Any]:
    """The loss of the target on held-out texts without and with its adapter.

    Args:
        texts: [P] each, of equal length.

    Returns:
        `base` and `adapted`, nats a token; `tokens`, how many were predicted.
    """
    with adapter.disabled():
        base = text_loss(target, texts)
    return {
        "base": base,
        "adapted": text_loss(target, texts),
        "tokens": sum(len(text) - 1 for text in texts),
    }


@torch.no_grad()
def text_loss(target: PreTrainedModel, texts: Sequence[Tensor]) -> float:
    """A model's mean loss on texts [P] of equal length, in nats a token."""
    nats, tokens = 0.0, 0
    for batch in torch.stack(list(texts)).to(target.device).split(_BATCH):
        logits: Tensor = target(input_ids=batch[:, :-1], use_cache=False).logits  # [B, P - 1, V]
        log_p = logits.float().log_softmax(-1).gather(2, batch[:, 1:, None])
        nats, tokens = nats - float(log_p.double().sum()), tokens + log_p.numel()
    return nats / tokens
