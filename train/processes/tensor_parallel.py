"""A target whose layers are divided among the processes of a run, by transformers' plan for it.

Each weight of a layer is cut into as many parts as there are processes (Megatron-LM, arXiv
1909.08053), so every forward of the target needs all of them, on the same batch. The drafter, and
the target's embedding and output layer, which it may read, are whole on every process.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from headstart.heads import OptionError
from headstart.heads.core import load_pretrained, output_layer
from headstart.heads.core.layer_sizes import layer_configs

Plan = str | dict[str, Any]
"""`auto`, or styles of transformers by the names of modules, in place of those in its plan."""


def in_parts(target: PreTrainedModel | None) -> bool:
    """Whether a target's layers are divided, so that all processes must run it on one batch."""
    return (getattr(target, "tp_size", None) or 1) > 1


def data_share(target: PreTrainedModel | None, args: TrainingArguments) -> tuple[int, int]:
    """Which share of the batches falls to this process, and of how many."""
    return (0, 1) if in_parts(target) else (args.process_index, args.world_size)


def loading_options(name: str, plan: Plan, world: int, **how: Any) -> dict[str, Any]:
    """The options of `from_pretrained` with which each process loads its part.

    Args:
        how: options that find the model's config, such as `revision`.

    Raises:
        OptionError: see `whole_plan`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_pretrained(AutoConfig, name, **how))
    styles = whole_plan(model, plan, world)
    return {"distributed_config": DistributedConfig(tp_size=world, tp_plan=styles)}


def whole_plan(model: PreTrainedModel, plan: Plan, world: int) -> dict[str, str]:
    """The style of each module, with the embedding and the output layer kept whole.

    Args:
        model: may be on `meta`.
        world: processes; 1 leaves out what depends on their number.

    Raises:
        OptionError: transformers has no plan for this architecture, the plan names what is not
            there, or the heads of attention cannot be divided.
    """
    ends = {id(model.get_input_embeddings()), id(output_layer(model))}
    kept = {name: "replicate" for name, module in model.named_modules() if id(module) in ends}
    own, kind = dict(model.tp_plan or {}), model.config.model_type
    styles = own | ({} if isinstance(plan, str) else plan)
    if not styles.keys() - kept.keys():
        raise OptionError(
            f"target.tp_plan is {plan!r}, and transformers has no plan for {kind}; name its "
            "modules and their styles there, or spread it with target.device_map or the launch "
            "file zero3."
        )
    config: Any = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        counts = {getattr(layer, name, None) or world for layer in layer_configs(config)}
        if heads := [count for count in sorted(counts) if count % world]:
            raise OptionError(
                f"target.tp_plan divides the target among {world} processes, and its {name} is "
                f"{heads[0]}; launch as many as divide it, or use the launch file zero3."
            )
    try:
        model._resolve_parallel_plans(DistributedConfig(tp_size=max(world, 2), tp_plan=styles))
    except (ValueError, KeyError) as error:
        raise OptionError(f"target.tp_plan: {error}") from error
    return styles | kept


def check_together(kind: str) -> None:
    """Raise OptionError where an engine divides weights in its own way."""
    if kind not in ("DDP", "one process"):
        raise OptionError(
            f"target.tp_plan divides the target among processes, and so does {kind}; use the "
            "launch file ddp, or set target.tp_plan=null."
        )
