"""How the layers of a model are divided among processes, by transformers' plan for it.

Each weight of a layer is cut into as many parts as there are processes (Megatron-LM, arXiv
1909.08053), so every forward of the model needs all of them, on the same tokens. The embedding and
the output layer are whole in every process: drafters read them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from .errors import OptionError
from .features import output_layer
from .layer_sizes import layer_configs
from .pretrained import causal_class, load_pretrained

Plan = str | dict[str, Any]
"""`auto`, or styles of transformers by the names of modules, in place of those in its plan."""


def processes_of(model: PreTrainedModel | None) -> int:
    """Among how many processes a model's layers are divided, all of which run it on one batch."""
    return getattr(model, "tp_size", None) or 1


def in_parts(model: PreTrainedModel | None) -> bool:
    """Whether a model's layers are divided among processes."""
    return processes_of(model) > 1


def way_refused(name: str, value: object) -> OptionError:
    """The error for a way to run, an argument by that name, which a divided target has not."""
    return OptionError(
        f"{name} is {value!r}, and the target is divided among processes, where transformers runs "
        f"its layers; leave {name} out."
    )


def options_in_parts(
    name: Any,
    plan: Plan,
    world: int,
    setting: str,
    otherwise: str,
    unplanned: str = "",
    **how: Any,
) -> dict[str, Any]:
    """The options of `from_pretrained` with which each process loads its part.

    Args:
        world: processes; how: options that find the model's config, such as `revision`.

    Raises:
        OptionError: see `whole_plan`.
    """
    with torch.device("meta"):
        config = load_pretrained(AutoConfig, name, **how)
        model = causal_class(config).from_config(config)
    styles = whole_plan(model, plan, world, setting, otherwise, unplanned)
    return {"distributed_config": DistributedConfig(tp_size=world, tp_plan=styles)}


def whole_plan(
    model: PreTrainedModel,
    plan: Plan,
    world: int,
    setting: str,
    otherwise: str,
    unplanned: str = "",
) -> dict[str, str]:
    """The style of each module, with the embedding and the output layer kept whole.

    Args:
        model: may be on `meta`.
        world: processes; 1 leaves out what depends on their number.
        setting: what asks for it, as errors name it; otherwise: what they advise instead;
            unplanned: what comes before that where transformers has no plan.

    Raises:
        OptionError: transformers is too old, or has no plan for this architecture, the plan names
            what is not there, or the heads of attention cannot be divided.
    """
    if not hasattr(model, "_resolve_parallel_plans"):
        raise OptionError(
            f"{setting} needs transformers 5.23, found {transformers.__version__}; install a newer "
            f"one, or {otherwise}."
        )
    ends = {id(model.get_input_embeddings()), id(output_layer(model))}
    kept = {name: "replicate" for name, module in model.named_modules() if id(module) in ends}
    own, kind = dict(model.tp_plan or {}), model.config.model_type
    styles = own | ({} if isinstance(plan, str) else plan)
    if not styles.keys() - kept.keys():
        raise OptionError(
            f"{setting} divides the target's layers, and transformers has no plan for {kind}; "
            f"{unplanned}{otherwise}."
        )
    config: Any = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        counts = {getattr(layer, name, None) or world for layer in layer_configs(config)}
        if heads := [count for count in sorted(counts) if count % world]:
            raise OptionError(
                f"{setting} divides the target among {world} processes, and its {name} is "
                f"{heads[0]}; take a number of processes that divides it, or {otherwise}."
            )
    try:
        model._resolve_parallel_plans(DistributedConfig(tp_size=max(world, 2), tp_plan=styles))
    except (ValueError, KeyError) as error:
        raise OptionError(f"{setting}: {error}") from error
    return styles | kept
