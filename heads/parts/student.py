"""A draft model's student: tensors beside it in its file of weights, and fewer rows of output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from ..core import ArtifactError, load_pretrained, output_layer, read_weights

KEPT = "draft_vocabulary"
"""The tensor [Vd] beside a student's weights: the only tokens that it proposes, as ids."""


def load_student(
    name: Any, args: Sequence[Any], options: dict[str, Any], beside: Sequence[str]
) -> tuple[Any, list[Any], dict[str, Tensor]]:
    """Load a causal language model as transformers does; its own code is never run.

    Args:
        args, options: of `from_pretrained`.
        beside: tensors that are no part of such a model.

    Returns:
        The model; what else was asked for, such as `output_loading_info`; those tensors that a
        folder's file of weights holds.
    """
    weights, found = Path(name) / SAFE_WEIGHTS_NAME, dict[str, Tensor]()
    if weights.is_file() and not _names(weights).isdisjoint(beside):
        tensors = read_weights(weights)
        found = {key: tensors.pop(key) for key in beside if key in tensors}
        config = options.get("config") or load_pretrained(AutoConfig, name)
        options = {**options, "config": config, "state_dict": tensors}
    options = {**options, "trust_remote_code": False}
    loaded: Any = load_pretrained(AutoModelForCausalLM, name, *args, **options)
    model, *report = loaded if isinstance(loaded, tuple) else (loaded,)
    return model, report, found


def _names(weights: Path) -> set[str]:
    try:
        with safe_open(weights, "pt") as file:
            return {*file.keys()}
    except SafetensorError:
        return set()  # what is wrong is said when it is loaded


def check_kept(ids: Tensor, whole: nn.Linear) -> None:
    """An ArtifactError for ids [Vd] that are not ascending rows of a whole output layer."""
    count = whole.weight.shape[0]
    fits = ids.dtype == torch.int64 and ids.dim() == 1 and 0 < len(ids) <= count
    if not (fits and int(ids[0]) >= 0 and int(ids[-1]) < count and bool((ids.diff() > 0).all())):
        raise ArtifactError(
            f"{KEPT} of the draft model holds {len(ids.reshape(-1)):,} values, expected ascending "
            f"token ids below {count:,}; restore its file of weights, or trim it again."
        )


def put_rows(model: PreTrainedModel, whole: nn.Linear, ids: Tensor) -> None:
    """Put the rows of some tokens, ids [Vd], in the place of a model's whole output layer.

    Raises:
        ArtifactError: the layer is quantised.
    """
    if type(whole) is not nn.Linear or not whole.weight.is_floating_point():
        raise ArtifactError(
            f"the draft model's output layer is {type(whole).__name__}, of which no rows can be "
            "left out; expected one that is not quantised."
        )
    place = output_layer(model).weight
    with torch.device("meta"):
        rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None)
    chosen = ids.to(whole.weight.device)
    taken = {name: each[chosen].to(place) for name, each in whole.state_dict().items()}
    rows.load_state_dict(taken, assign=True)
    model.set_output_embeddings(rows)


def whole_state(model: PreTrainedModel, whole: nn.Linear) -> dict[str, Tensor]:
    """The state dict of a model with its whole output layer in the place of the rows kept."""
    rows = output_layer(model)
    name = next(name for name, module in model.named_modules() if module is rows)
    parts = {f"{name}.{part}": each.to(rows.weight) for part, each in whole.state_dict().items()}
    return model.state_dict() | parts
