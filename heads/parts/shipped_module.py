"""The module for multi-token prediction in a target's own files, which transformers leaves out.

Of most models it is a further layer, numbered after the others, and `MtpModel` of transformers
reads it. The files of Qwen3-Next and Qwen3.5, whose configs do not tell of it, name it

    mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden   what norms tokens and hidden states
    mtp.fc                                              what mixes the two
    mtp.layers.0, mtp.norm                              a layer that attends, and the norm after it

Those of Hy3 call the norm after its further layer `final_layernorm`.
"""

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel
from transformers.utils import SAFE_WEIGHTS_NAME

from ..core import OptionError, brief
from ..core.errors import MALFORMED
from .own_layers import added_to_scale
from .shipped_tensors import find_tensors, quantized, read_tensors
from .target_layer import layer_config, own_layer_is_known, target_layer

PREFIX, _MIXES = "mtp.", "mtp.fc.weight"
_PARTS = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
}
"""Our names of what is no part of the layer, and theirs."""
_EMBEDDING = "embed_tokens.weight"
_LAST_NORMS = ".final_layernorm.", ".shared_head.norm."
"""What Hy3's files call the norm after a further layer, and all others."""
_PUBLISHED_COUNT = "num_nextn_predict_layers"
"""How published configs call the number of such layers. Of GLM-4.7-Flash and Hy3 transformers has
no field for it, and keeps it as it is."""

_WINDOWS_UNKNOWN = "some layers see a window alone, and nothing says whether its own does"

logger = logging.getLogger(__name__)


class NoModule(OptionError):
    """A target whose files hold no module that can be read.

    Attributes:
        reason: why it cannot be read; empty where nothing tells of one.
    """

    def __init__(self, target: PreTrainedModel, reason: str = ""):
        self.reason = reason
        super().__init__(
            f"{target.name_or_path or 'the target'} holds no module for multi-token prediction "
            f"that can be read{reason and f' ({reason})'}; train one (drafter.family=mtp), or use "
            "another drafter."
        )


def shipped_module(target: PreTrainedModel) -> dict[str, Tensor]:
    """The first layer of the multi-token prediction in a target's own files.

    Returns:
        Its tensors by the names of `Mtp`, in the target's dtype on the CPU.

    Raises:
        NoModule: there is none, or it cannot be read.
        OptionError: it is of a kind that cannot be run.
    """
    text = target.config.get_text_config(decoder=True)
    declared = getattr(text, "num_mtp_layers", None) or getattr(text, _PUBLISHED_COUNT, None)
    if not target.name_or_path:
        raise NoModule(target)
    try:
        named = find_tensors(target, f"^{re.escape(PREFIX)}")
        if _MIXES in named:
            return _by_name(target, named)
        if declared:
            return _numbered(target, text.num_hidden_layers, declared)
    except OptionError:
        raise
    except (*MALFORMED, OSError, SafetensorError) as error:
        raise NoModule(target, brief(error, 200)) from error
    other = f"its files hold {min(named)}, of a kind that is not known here" if named else ""
    raise NoModule(target, other)


def _by_name(target: PreTrainedModel, named: dict[str, Path]) -> dict[str, Tensor]:
    """The module of files that name it as above; its layer is read as a model's only one."""
    read = read_tensors(target, named)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    _say_first(target, len(layers))
    others = tuple(f"layers.{number}." for number in layers - {"0"})
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}
    if missing := [name for name in _PARTS.values() if name not in tensors]:
        raise ValueError(f"{PREFIX}{missing[0]} is missing")
    if _EMBEDDING in tensors:
        raise ValueError("it embeds tokens by itself")
    if not own_layer_is_known(target):
        raise ValueError(_WINDOWS_UNKNOWN)
    found = {ours: tensors.pop(theirs) for ours, theirs in _PARTS.items()}
    config: Any = layer_config(target_layer(target))
    kind: Any = AutoModel._model_mapping[type(config)]  # type: ignore[attr-defined]
    # Its tokens are embedded by the target; this names no tensor of a file.
    blank = torch.zeros(config.vocab_size, config.hidden_size)
    model, report = kind.from_pretrained(
        None, config=config, dtype=target.dtype, output_loading_info=True,
        state_dict={_EMBEDDING: blank} | tensors, ignore_mismatched_sizes=True,
    )  # fmt: skip
    wrong = [*report["missing_keys"], *report["unexpected_keys"]]
    if wrong := sorted([*wrong, *(name for name, *_ in report["mismatched_keys"])]):
        raise ValueError(f"{PREFIX}{wrong[0]} is missing, unknown or of another shape")
    found = {name: tensor.to(target.dtype) for name, tensor in found.items()}
    for name in ("enorm.weight", "hnorm.weight"):
        found[name] += added_to_scale(model.norm)
    states = model.state_dict()
    del states[_EMBEDDING]
    return found | {f"model.{name}": tensor for name, tensor in states.items()}


def named_tensors(drafter: Any) -> dict[str, Tensor]:
    """The tensors of an `Mtp` by the names that `_by_name` reads, in the target's dtype."""
    found, layer = {}, {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("model."):
            layer[name.removeprefix("model.")] = tensor
        else:
            found[_PARTS[name]] = tensor
    added = added_to_scale(drafter.model.norm)
    for name in ("enorm.weight", "hnorm.weight"):
        found[_PARTS[name]] = found[_PARTS[name]] - added
    found |= revert_weight_conversion(drafter.model, layer)
    return {PREFIX + name: tensor.to(drafter.target.dtype) for name, tensor in found.items()}


def _numbered(target: PreTrainedModel, before: int, count: int) -> dict[str, Tensor]:
    """The module of files that number its `count` layers after the `before` ones of the target."""
    # By these patterns transformers finds the weights, for layers of released checkpoints alone.
    known = target._keys_to_ignore_on_load_unexpected or []
    patterns = [*known, *(rf"(^|\.)layers\.{before + n}\." for n in range(count))]
    named: Any = _counting(target, count)
    named._keys_to_ignore_on_load_unexpected = patterns
    with _readable(named, find_tensors(target, "|".join(patterns))) as readable:
        module: Any = MtpModel.from_pretrained(readable, device_map={"": "cpu"})
    layer = module.layers[0]
    if layer.post_norm is None:
        kind = target.config.get_text_config(decoder=True).model_type
        raise OptionError(
            f"{kind} norms the states of its layers for multi-token prediction in "
            "another way than mtp does; train a drafter of another family, such as eagle3."
        )
    _say_first(target, len(module.layers))
    found = {f"{name}.weight": getattr(layer, name).weight for name in ("enorm", "hnorm")}
    found = {name: weight + added_to_scale(layer.post_norm) for name, weight in found.items()}
    found["eh_proj.weight"] = layer.eh_proj.weight
    for prefix, part in (("layers.0", layer.mtp_block), ("norm", layer.post_norm)):
        found |= {f"model.{prefix}.{name}": each for name, each in part.state_dict().items()}
    return found


def _counting(target: PreTrainedModel, count: int) -> Any:
    """A copy of a target whose config has what the class of transformers asks for: the number of
    layers, and their kinds, which are that of the target's last layer where no config says so.

    Raises:
        ValueError: it does not say so, and the target's layers attend in several ways.
    """
    other: Any = copy.copy(target)
    if getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return other
    if not own_layer_is_known(target):
        raise ValueError(_WINDOWS_UNKNOWN)
    other.config = copy.deepcopy(target.config)
    text = other.config.get_text_config(decoder=True)
    text.num_mtp_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        if types := getattr(text, name, None):
            setattr(text, f"mtp_{name}", [types[-1]] * count)
    return other


@contextmanager
def _readable(target: Any, named: dict[str, Path]) -> Iterator[Any]:
    """A target whose files hold tensors in full that its own hold in FP8, and by the names of most
    models, while this lasts.

    The class of transformers reads files, and takes what is stored for weights, without scales.
    """
    if not quantized(named) and not any(_LAST_NORMS[0] in name for name in named):
        yield target
        return
    with TemporaryDirectory(prefix="headstart-") as folder:
        tensors = read_tensors(target, named)
        tensors = {name.replace(*_LAST_NORMS): tensor for name, tensor in tensors.items()}
        save_file(tensors, Path(folder) / SAFE_WEIGHTS_NAME, {"format": "pt"})
        other = copy.copy(target)
        other.config = copy.copy(target.config)
        other.config.name_or_path = folder
        other._weight_conversions = None  # which may undo a quantization
        yield other


def _say_first(target: PreTrainedModel, layers: int) -> None:
    if layers > 1:
        logger.warning(
            "%s has %d layers for multi-token prediction, one for each depth; the first drafts at "
            "every depth.", target.name_or_path, layers,
        )  # fmt: skip
