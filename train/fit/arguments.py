"""A recipe's settings as the arguments of transformers' Trainer and `from_pretrained`."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from headstart.heads import OptionError

from ..processes.agreement import check_launcher, is_process_0
from ..processes.engine import deepspeed_settings, under_fsdp
from ..recipe import TargetSpec, Train

logger = logging.getLogger(__name__)

_PRECISION = "ACCELERATE_MIXED_PRECISION"  # as a launcher sets it


def training_arguments(
    spec: Train, folder: Path, seed: int, together: bool = False, **changes: Any
) -> TrainingArguments:
    """The arguments of a training run whose checkpoints go to `folder`.

    `together` says that all processes compute the same batches, see `tensor_parallel`.

    Making them also sets up the processes, which must happen before anything else asks for those.
    Raises OptionError for an 8-bit optimizer without bitsandbytes or a tracker that is not
    installed, RecipeError where the rows of a step cannot be divided, and ProcessLost where the
    launcher is gone.
    """
    for tracker in spec.report_to:
        if importlib.util.find_spec(tracker) is None:
            raise OptionError(
                f"train.report_to names {tracker}, which is not installed; pip install {tracker}, "
                "or leave it out: metrics.jsonl is written always."
            )
    if spec.optimizer == "adamw_8bit":
        _check_bitsandbytes("train.optimizer=adamw_8bit", "train.optimizer=adamw")
        changes = {"optim": "adamw_bnb_8bit", **changes}
    gpu = torch.cuda.is_available()
    processes = 1 if together else int(os.environ.get("WORLD_SIZE", 1))  # as launchers set it
    bf16 = multiplies_in_bf16()
    deepspeed, fsdp = deepspeed_settings(os.environ, bf16), under_fsdp(os.environ)
    if deepspeed is not None:
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # they are in the settings now
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would print that it found none
    every = spec.eval_every or spec.max_steps
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": spec.max_steps,
        "learning_rate": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "adam_beta1": spec.beta1,
        "adam_beta2": spec.beta2,
        "adam_epsilon": spec.epsilon,
        "max_grad_norm": spec.clip,
        "per_device_train_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation(processes),
        "seed": seed,
        "use_cpu": not gpu,
        # Autocast of products alone: weights, gradients and the optimizer's state stay float32.
        "bf16": bf16 and deepspeed is None and not fsdp,
        "deepspeed": deepspeed,
        "dataloader_pin_memory": gpu,
        "eval_strategy": "steps",
        "eval_steps": every,
        "save_steps": every,
        "load_best_model_at_end": True,
        "metric_for_best_model": "tau",
        "logging_steps": max(min(25, spec.max_steps // 50), 1),
        "logging_nan_inf_filter": False,  # it reads the loss from the device at every step
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "ddp_timeout": 1800,  # what takes longer is waited for outside of collectives
        "report_to": spec.report_to or "none",
        "run_name": folder.parent.name,  # the recipe's
        "log_level": "error",
        "disable_tqdm": True,  # the bar of `Progress` knows about the time bound
    }
    check_launcher()
    _decide_precision(bf16)
    args = TrainingArguments(**settings | changes)
    args.own_autocast = bf16 and fsdp  # type: ignore[attr-defined]  # accelerate's casts weights
    args._n_gpu = min(args.n_gpu, 1)  # without a launcher take one GPU, instead of DataParallel
    return args


def multiplies_in_bf16() -> bool:
    """Whether training takes products in bfloat16: on GPUs that do."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _decide_precision(bf16: bool) -> None:
    """Leave products to the settings above, whatever a launcher's own configuration asks for."""
    asked = os.environ.get(_PRECISION, "no")
    if asked not in ("no", "bf16" if bf16 else "no") and is_process_0():
        logger.warning(
            "the launcher's mixed_precision %s is not used: products are taken in %s here, and the "
            "target has target.dtype", asked, "bfloat16" if bf16 else "float32",
        )  # fmt: skip
    os.environ[_PRECISION] = "no"


def load_options(spec: TargetSpec, device: torch.device, world: int = 1) -> dict[str, Any]:
    """The options of `from_pretrained` for a recipe's target.

    Weights are read straight to the device, where that is not the CPU. With `target.tp_plan` a
    single process spreads them over its GPUs; of several see `tensor_parallel`. `4bit` is
    bitsandbytes' NF4 with products in bfloat16 (QLoRA, arXiv 2305.14314).

    Args:
        device: of this process, of `world` in all.

    Raises:
        OptionError: there is no bitsandbytes for 4bit; or a map of devices for several processes.
    """
    found: dict[str, Any] = {"dtype": spec.dtype}
    for name in ("revision", "attn_implementation"):
        if (value := getattr(spec, name)) is not None:
            found[name] = value
    if spec.device_map is not None:
        if world > 1:
            raise OptionError(
                f"target.device_map is {spec.device_map!r} with {world} processes, each of which "
                "would spread the target over the same devices; launch one process, or leave it "
                "out."
            )
        found["device_map"] = spec.device_map
    elif spec.tp_plan is not None and device.type != "cpu":
        if world == 1:  # what comes nearest
            found["device_map"] = "auto"
    elif device.type != "cpu" and not is_deepspeed_zero3_enabled():
        found["device_map"] = {"": device}
    if spec.dtype != "4bit":
        return found
    _check_bitsandbytes("target.dtype=4bit", "target.dtype=bfloat16")
    return {
        "device_map": {"": device},  # a quantized model cannot be moved afterwards
        **found,
        "dtype": torch.bfloat16,
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    }


def _check_bitsandbytes(setting: str, alternative: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            f"{setting} needs bitsandbytes, which is not installed; pip install bitsandbytes (for "
            f"a GPU), or set {alternative}."
        )
