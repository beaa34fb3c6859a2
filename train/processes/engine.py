"""What a run is spread over: one process, or several under DDP, FSDP2 or DeepSpeed ZeRO.

A launcher says it by its environment. DeepSpeed's settings are made here from that and from the
recipe, so a launch file needs to say no more than the ZeRO stage and what is offloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, PreTrainedModel, TrainingArguments
from transformers.integrations import deepspeed as integration

from headstart.heads import OptionError
from headstart.heads.core import (
    decoder_layers,
    decoder_of,
    gathered,
    in_shards,
    load_pretrained,
    output_layer,
)

TOGETHER = "tensor parallelism"
"""What a run is spread by whose processes divide the target's layers, in words."""


_OF_RECIPE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping",
)  # fmt: skip
"""DeepSpeed's names of what the recipe says."""


def deepspeed_settings(environment: Mapping[str, str], bf16: bool) -> dict[str, Any] | None:
    """DeepSpeed's configuration for a run that was launched for it, None for any other run.

    `auto` is filled in by transformers, or by `size_buckets`.

    Args:
        environment: as `accelerate launch` sets it.
        bf16: whether products are taken in bfloat16. Weights, gradients, the optimizer's state and
            what is sent between processes stay float32.

    Raises:
        OptionError: a configuration file of the user's own that casts weights, or has an optimizer
            or a schedule, or is no JSON.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    settings = _settings_of_stage(environment) if file == "none" else _own_settings(Path(file))
    if bf16:
        precision = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        settings.setdefault("torch_autocast", precision)
    return settings


def _settings_of_stage(environment: Mapping[str, str]) -> dict[str, Any]:
    stage = int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        # Neither fetched early nor kept for later: what is depends on the modules that were called
        # so far, which differ between processes, see `keep_whole`.
        zero |= {
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": "auto",
        }
    for what in ("optimizer", "param"):
        name = f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE"
        if (device := environment.get(name, "none")) != "none":
            zero[f"offload_{what}"] = {"device": device, "pin_memory": torch.cuda.is_available()}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # the Trainer's own AdamW
        "zero_force_ds_cpu_optimizer": False,  # the same with offloading
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        **dict.fromkeys(_OF_RECIPE, "auto"),
    }


def _own_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"DeepSpeed's configuration {file} cannot be read ({error}); correct the path in the "
            "launch file, which counts from the current folder, or leave it out."
        ) from error
    for name in ("bf16", "fp16"):
        section = settings.setdefault(name, {"enabled": False})
        if section.get("enabled") == "auto":
            section["enabled"] = False
        if section.get("enabled"):
            raise OptionError(
                f"{file} sets {name}.enabled, which casts the drafter's weights; set it to false: "
                "on a GPU products are taken in bfloat16 all the same, and the target has the "
                "recipe's dtype."
            )
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise OptionError(
                f"{file} has the section {name}, which would replace the recipe's; remove it: the "
                "optimizer is AdamW, and its rates are those of train.learning_rate and "
                "train.warmup_ratio."
            )
    settings = dict.fromkeys(_OF_RECIPE, "auto") | settings
    settings.setdefault("zero_allow_untested_optimizer", True)
    settings.setdefault("zero_force_ds_cpu_optimizer", False)
    return settings


def under_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether a run was launched for FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def kind_of(args: TrainingArguments, environment: Mapping[str, str]) -> str:
    """What spreads a run: `one process`, `DDP`, `FSDP2`, `ZeRO-2`, `ZeRO-3` …"""
    if (plugin := args.deepspeed_plugin) is not None:
        return f"ZeRO-{plugin.zero_stage}"
    if under_fsdp(environment):
        return f"FSDP{environment.get('FSDP_VERSION', '1')}"
    return "DDP" if args.world_size > 1 else "one process"


def describe(
    args: TrainingArguments, environment: Mapping[str, str], together: bool = False
) -> str:
    """What a run is spread over, such as `ZeRO-2, 8 processes, cuda, bfloat16 products`.

    `together` says that its processes divide the target's layers, see `tensor_parallel`.
    """
    plugin, world = args.deepspeed_plugin, args.world_size
    bf16 = args.bf16 or getattr(args, "own_autocast", False)
    bf16 |= plugin is not None and "torch_autocast" in plugin.deepspeed_config
    processes = [f"{world} processes"] if world > 1 else []
    dtype = "bfloat16 products" if bf16 else "float32"
    kind = TOGETHER if together and world > 1 else kind_of(args, environment)
    return ", ".join([kind, *processes, args.device.type, dtype])


def join_deepspeed(args: TrainingArguments) -> None:
    """Let DeepSpeed use the process group, which shards of models need that are loaded early."""
    if args.deepspeed_plugin is None or args.world_size == 1:
        return
    import deepspeed

    if args.device.type == "cpu":
        # It would compile an operation for inference, for a minute, and print that it has.
        deepspeed.ops.__compatible_ops__ = {}  # type: ignore[attr-defined]
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def check_kind(kind: str, made: DistributedType) -> None:
    """Raise OptionError where accelerate has made something else than a launch asks for."""
    engines = {DistributedType.DEEPSPEED: "ZeRO", DistributedType.FSDP: "FSDP"}
    found = engines.get(made, "one process" if made == DistributedType.NO else "DDP")
    if not kind.startswith(found):
        raise OptionError(
            f"the launch asks for {kind}, and accelerate has made {found} of it; on a CPU it has "
            "no FSDP, and DeepSpeed only without ACCELERATE_USE_CPU."
        )


def size_buckets(args: TrainingArguments, hidden_size: int) -> None:
    """Give DeepSpeed's buckets the sizes that transformers gives them for a model's width."""
    if (config := getattr(args, "hf_deepspeed_config", None)) is not None:
        config.fill_only("zero_optimization.reduce_bucket_size", hidden_size * hidden_size)
        # Smaller parameters stay whole on every process.
        config.fill_only("zero_optimization.stage3_param_persistence_threshold", 10 * hidden_size)


def weights_are_sharded() -> bool:
    """Whether models are loaded in parts, one a process, which ZeRO-3 does from the start."""
    return integration.is_deepspeed_zero3_enabled()


def ends_of(target: PreTrainedModel) -> list[Any]:
    """A target's modules outside of its layers: embedding, output layer, and norms."""
    decoder: Any = decoder_of(target)
    inside = {id(module) for module in decoder_layers(target).modules()}
    parts = [part for part in decoder.modules() if part is not decoder and id(part) not in inside]
    own = [part for part in parts if any(True for _ in part.parameters(recurse=False))]
    return list(dict.fromkeys([target.get_input_embeddings(), output_layer(target), *own]))


def shard_layers(target: PreTrainedModel) -> None:
    """Let FSDP2 shard each layer of a target for itself; the rest, and the drafter, go together."""
    for layer in decoder_layers(target):
        fully_shard(layer)


@contextmanager
def layer_by_layer(target: PreTrainedModel) -> Iterator[None]:
    """While this lasts a target in shards runs before there is an engine; all processes in step.

    Each layer is whole while it runs, and all else the whole time, as under ZeRO-3 while training.
    """
    layers, handles, held = decoder_layers(target), [], ExitStack()
    inside = {id(weight) for weight in layers.parameters()}
    others = [
        part
        for part in target.modules()
        if any(id(weight) not in inside for weight in part.parameters(recurse=False))
    ]

    def fetch(*given: Any) -> None:
        held.enter_context(gathered(given[0]))

    def release(*given: Any) -> None:
        held.pop_all().close()

    if in_shards(target):
        handles += [layer.register_forward_pre_hook(fetch) for layer in layers]
        handles += [layer.register_forward_hook(release) for layer in layers]
    try:
        with gathered(*others), held:
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def loaded_as(dtype: str, model: str) -> Iterator[None]:
    """Shards of a model that is loaded while this lasts have a recipe's `target.dtype`.

    ZeRO-3 would make them float32, whatever `from_pretrained` is told.

    Raises:
        OptionError: it makes no shards of this dtype.
    """
    config = integration.deepspeed_config() if weights_are_sharded() else None
    if config is None:
        yield
        return
    if dtype == "auto":
        found = load_pretrained(AutoConfig, model).dtype or "float32"
        dtype = str(found).removeprefix("torch.")
    names = {"float32": None, "bfloat16": "bf16", "float16": "fp16"}
    if dtype not in names:
        raise OptionError(
            f"target.dtype is {dtype}, which DeepSpeed ZeRO-3 cannot shard; expected one of "
            f"{', '.join(names)}."
        )
    if (name := names[dtype]) is None:
        yield
        return
    before = config.get(name)
    config[name] = {"enabled": True}
    try:
        yield
    finally:
        config[name] = before


def leave_out_frozen(engine: Any) -> None:
    """Keep the frozen target out of a DeepSpeed engine's checkpoints."""
    engine.save_checkpoint = partial(engine.save_checkpoint, exclude_frozen_parameters=True)
    load = engine.load_checkpoint

    def load_trained(folder: str, **how: Any) -> Any:
        return load(folder, **how | {"load_module_strict": False})

    engine.load_checkpoint = load_trained


def keep_whole(engine: Any, modules: Iterable[nn.Module]) -> None:
    """Keep the weights of modules whole on all processes, where a DeepSpeed engine shards weights.

    Processes have different numbers of labels, and so call a drafter's modules, and the output
    layer, different numbers of times; fetching weights for each call would not go in step.
    """
    zero = engine.optimizer
    if not hasattr(zero, "persistent_parameters"):
        return
    known = {id(weight) for weight in zero.persistent_parameters}
    weights: list[Any] = [w for m in modules for w in m.parameters() if hasattr(w, "ds_id")]
    for weight in weights:
        weight.ds_persist = True
        weight.is_external_param = True  # or they are released while the first step is recorded
    zero.persistent_parameters += [w for w in weights if id(w) not in known]
    zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def forget_steps(optimizer: Any, chosen: Callable[[dict[str, Any]], bool]) -> None:
    """Set the counts of steps of DeepSpeed's Adam to zero, in the parameter groups that are chosen.

    DeepSpeed keeps the state of shards that it makes of the groups.
    """
    zero = optimizer.optimizer  # inside of accelerate's wrapper
    adam = zero.optimizer
    if hasattr(zero, "sub_group_to_group_id"):  # ZeRO-3, which has no shards in Adam's own groups
        numbers = zero.sub_group_to_group_id.items()
        shards = [(zero.fp32_partitioned_groups_flat[i], adam.param_groups[g]) for i, g in numbers]
    else:
        shards = [(shard, group) for group in adam.param_groups for shard in group["params"]]
    for shard, group in shards:
        if chosen(group) and "step" in (state := adam.state.get(shard, {})):
            state["step"] = torch.zeros_like(state["step"])
