"""The batches that a recipe asks for, and the epoch that a run is in."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from headstart.heads import OptionError

from ..data.batches import Batches
from ..data.packing import Packs
from ..data.training_rows import Rows
from ..processes.tensor_parallel import data_share
from ..recipe import Train
from .packing_trial import check_packing, packing_obstacle
from .target_with_drafter import TargetWithDrafter

logger = logging.getLogger(__name__)


class NextEpoch(TrainerCallback):
    """Tells the batches which epoch begins, also where a resumed run begins within it."""

    def __init__(self, batches: Batches):
        self.batches = batches

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps)


def make_batches(
    module: TargetWithDrafter, args: TrainingArguments, rows: Rows, spec: Train
) -> Batches:
    """This process's batches. Raises OptionError where rows are to be packed, but cannot be."""
    packs = Packs(rows.lengths, spec.packed_length) if packs_rows(module, spec) else None
    return Batches(
        rows.lengths, args.train_batch_size, args.gradient_accumulation_steps, args.seed,
        *data_share(module.target, args), spec.group_by_length, packs,
    )  # fmt: skip


def packs_rows(module: TargetWithDrafter, spec: Train) -> bool:
    """Whether rows are packed. Raises OptionError where they are to be, but cannot be."""
    check_packing(spec.packing, module.target)
    if spec.packing is False:
        return False
    obstacle = packing_obstacle(module)
    if obstacle is None:
        return True
    if spec.packing:
        raise OptionError(
            f"train.packing is true, but {obstacle}; set it to false, or try another "
            "target.attn_implementation."
        )
    logger.warning("rows are not packed: %s", obstacle)
    return False


def steps_of(epochs: float, steps: int, most: int) -> int:
    """The steps of so many epochs of `steps` each, but at most `most`."""
    wanted = math.ceil(epochs * steps)
    if wanted > most:
        logger.warning(
            "train.max_steps %d ends training after %.2f of %g epochs", most, most / steps, epochs
        )
    return min(wanted, most)
