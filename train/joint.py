"""Training drafter and target together: the optimizer's groups, bitsandbytes, how far it moved."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from headstart.heads import OptionError
from headstart.heads.parts.adapter import Adapter

from .clock import Clock

_BATCH = 16  # texts a forward


def split_groups(optimizer: torch.optim.Optimizer, adapter: Adapter) -> None:
    """Give the adapter parameter groups of its own, marked `adapter`; the others' rate is scaled.

    The learning rate that the groups have is the adapter's; the drafter's is `head_rate` times it.
    """
    own = {id(parameter) for parameter in adapter.parameters()}
    groups = []
    for group in optimizer.param_groups:
        for adapted in (False, True):
            chosen = [p for p in group["params"] if (id(p) in own) == adapted]
            rate = group["lr"] * (1.0 if adapted else adapter.schedule.head_rate)
            if chosen:
                groups.append({**group, "params": chosen, "lr": rate, "adapter": adapted})
    optimizer.param_groups[:] = groups


class Waiting(TrainerCallback):
    """Takes an adapter's gradients away, zeros all, for as long as the drafter learns alone.

    Adam would count them as steps; told that so many are spent, it makes the first real ones
    several times as long as the learning rate says.
    """

    def __init__(self, adapter: Adapter, clock: Clock):
        self.adapter, self.clock = adapter, clock

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.adapter.schedule.weight_at(self.clock.at(state.global_step)) is None:
            for parameter in self.adapter.parameters():
                parameter.grad = None


def check_bitsandbytes(setting: str, otherwise: str) -> None:
    """Refuse a setting that needs bitsandbytes where it is not installed.

    Raises:
        OptionError: it is not.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            f"{setting} needs bitsandbytes, which is not installed; pip install bitsandbytes (for "
            f"a GPU), or set {otherwise}."
        )


def load_options(dtype: str, device: torch.device) -> dict[str, Any]:
    """How `from_pretrained` is to load a target of the recipe's `target.dtype`.

    `4bit` is bitsandbytes' NF4 with products in bfloat16 (QLoRA, arXiv 2305.14314).

    Raises:
        OptionError: `4bit` without bitsandbytes.
    """
    if dtype != "4bit":
        return {"dtype": dtype}
    check_bitsandbytes("target.dtype=4bit", "target.dtype=bfloat16")
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {
        "dtype": torch.bfloat16,
        "quantization_config": quantization,
        "device_map": {"": device},  # a quantized model is not moved afterwards
    }


def adapter_loss_change(
    target: PreTrainedModel, adapter: Adapter, texts: Sequence[Tensor]
) -> dict[str, Any]:
    """The loss of the target on held-out texts without and with its adapter.

    Args:
        texts: [P] each, of equal length.

    Returns:
        `base` and `adapted`, nats a token; `tokens`, how many were predicted.
    """
    with adapter.off():
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
