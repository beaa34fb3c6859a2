"""Stops training at a loss that is no finite number, and says where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads import OptionError
from headstart.heads.core import in_shards

from ..processes.agreement import from_all

_NAMED = 8  # rows at most

Part = tuple[dict[str, Any], Tensor]
"""A micro-batch, and its loss."""


class NonFiniteLoss(OptionError):
    """The loss, or a weight, is NaN or infinite."""


def check_weights(modules: Iterable[nn.Module], when: str, kept: str) -> None:
    """Raise NonFiniteLoss where a weight that learns is not finite; all processes call."""
    weights = [weight for module in modules for weight in module.parameters()]
    if not all(from_all(all(bool(weight.isfinite().all()) for weight in weights))):
        raise NonFiniteLoss(
            f"{when}: the drafter's weights are not finite; lower train.learning_rate or "
            f"train.clip, and start the run again. {kept}"
        )


def rows_to_blame(module: nn.Module, parts: Sequence[Part], options: dict[str, Any]) -> str:
    """The rows whose loss is not finite, in words: `row 3`; all processes call.

    Args:
        module: computes the loss of a batch, and of each of its rows alone where that does not need
            the other processes.
        parts: this process's micro-batches of the step.
        options: further arguments of the module's forward.
    """
    own: list[int] = []
    for batch, loss in parts:
        if not bool(loss.isfinite()):
            own += _rows(module, batch, options)
    found = sorted({row for rows in from_all(own) for row in rows})
    if not found:
        return "rows that are in no store"
    named = ", ".join(map(str, found[:_NAMED]))
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"training row{'s' if found[1:] else ''} {named}{more}"


@torch.no_grad()
def _rows(module: nn.Module, batch: dict[str, Any], options: dict[str, Any]) -> list[int]:
    size = len(batch["tokens"])
    numbers = batch.get("rows")
    if numbers is None:
        return []
    numbers = [torch.as_tensor(some).flatten().tolist() for some in numbers]
    guilty = list(range(size))
    if not in_shards(module):
        each = (
            {name: x[i : i + 1] if torch.is_tensor(x) else x for name, x in batch.items()}
            for i in range(size)
        )
        alone = [i for i, one in enumerate(each) if not module(**one, **options)["loss"].isfinite()]
        guilty = alone or guilty
    return [row for i in guilty for row in numbers[i] if row >= 0]
