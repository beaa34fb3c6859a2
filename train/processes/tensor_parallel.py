"""A run whose target's layers are divided among its processes, see `heads/core/tensor_parallel.py`.

All of them train on the same batches; the drafter is whole on every process.
"""

from transformers import PreTrainedModel, TrainingArguments

from headstart.heads import OptionError
from headstart.heads.core import in_parts

WORDS = {
    "setting": "target.tp_plan",
    "otherwise": "spread it with target.device_map, or use the launch file zero3",
    "unplanned": "name its modules and their styles there, ",
}
"""How errors name what divides it, and what they advise instead."""


def data_share(target: PreTrainedModel | None, args: TrainingArguments) -> tuple[int, int]:
    """Which share of the batches falls to this process, and of how many."""
    return (0, 1) if in_parts(target) else (args.process_index, args.world_size)


def check_together(kind: str) -> None:
    """Raise OptionError where an engine divides weights in its own way."""
    if kind not in ("DDP", "one process"):
        raise OptionError(
            f"target.tp_plan divides the target among processes, and so does {kind}; use the "
            "launch file ddp, or set target.tp_plan=null."
        )
