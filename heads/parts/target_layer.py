"""A decoder layer of the target's own kind, for a drafter."""

import copy
import json
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ..core import OptionError, brief
from ..core.unsafe_settings import without_unsafe
from .own_layers import attending_layers, layers_of, recurrent_layers

_IDS = 64
"""Token ids of the trial of such a layer, whose embeddings are made up."""


_AS_FIRST = ("exaone4", "exaone_moe")
"""Types of language models whose own multi-token prediction has a layer like their first one, which
sees a window with rotary positions and has no experts, as vLLM runs it. Configs do not say so, and
the layers that see the whole text have no positions."""


def target_layer(target: PreTrainedModel) -> dict[str, Any]:
    """The config of a model of one of the target's layers, as plain data.

    It is the layer of the target's own multi-token prediction where that is known, else as of
    `one_layer`.
    """
    text = target.config.get_text_config(decoder=True)
    if text.model_type in _AS_FIRST:
        return _plain(layers_of(text, [0]))
    if not getattr(text, "num_mtp_layers", None):
        return one_layer(text)
    try:
        described = target.config.get_mtp_config()
    except ValueError:  # it counts such layers, and does not say of which kind they are
        return one_layer(text)
    return _plain(layers_of(_with_own_keys(described), [0]))


def own_layer_is_known(target: PreTrainedModel) -> bool:
    """Whether `target_layer` is sure to attend as the target's own multi-token prediction does."""
    text = target.config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    own = getattr(text, "mtp_layer_types", None)
    if text.model_type in _AS_FIRST:  # whose engines heed such a setting, where there is one
        return own is None or list(own[:1]) == list(types[:1])
    alike = len({types[number] for number in attending_layers(text, alone=False)}) < 2
    return alike or bool(own)


def one_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """The same of the last layer that attends to the whole text, of a language model's config.

    Raises:
        OptionError: every layer is recurrent, or see `layers_of`.
    """
    types = getattr(config, "layer_types", None) or []
    whole = [number for number, kind in enumerate(types) if kind == "full_attention"]
    if not whole and not (whole := attending_layers(config)):
        raise _recurs(config.model_type)
    return _plain(layers_of(_with_own_keys(config), [max(whole)]))


def _with_own_keys(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same, or a copy where the last layers read others' keys and values (Gemma 4)."""
    if getattr(config, "num_kv_shared_layers", None):
        config = copy.deepcopy(config)
        config.num_kv_shared_layers = 0
    return config


def _recurs(kind: Any) -> OptionError:
    return OptionError(
        f"{kind} has no layer that attends without a recurrent part, which mtp needs: use eagle3."
    )


def _plain(config: Any) -> dict[str, Any]:
    """A config as plain data without tokens, and without settings that load code or files."""
    config.vocab_size = _IDS
    if config.model_type.startswith("gemma4"):
        config.hidden_size_per_layer_input = 0  # it is given no token to look such inputs up for
    config.dtype = None
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, 0)  # some kinds of models must have one
    found = json.loads(json.dumps(config.to_diff_dict(), default=str))  # as a file gives it back
    left_out = ("_name_or_path", "architectures", "transformers_version", "dtype")
    return {key: value for key, value in without_unsafe(found).items() if key not in left_out}


def _read(value: Any) -> Any:
    """A config from a file, where transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        special = value.get("__float__") if len(value) == 1 else None
        return float(special) if special else {name: _read(each) for name, each in value.items()}
    return [_read(each) for each in value] if isinstance(value, list) else value


def layer_config(config: dict[str, Any]) -> PreTrainedConfig:
    """The config of the model of such a layer.

    Raises:
        OptionError: it is of a kind that transformers does not have, or has no model of.
    """
    kind = config.get("model_type")
    try:
        return AutoConfig.for_model(**_read(config))
    except (KeyError, ValueError) as error:
        raise _unknown(kind) from error
    except StrictDataclassError as error:
        reason = brief(error.__cause__ or error, 100).rstrip(".")
        raise OptionError(
            f"{kind} has no model of a single layer ({reason}), which mtp needs: use eagle3."
        ) from error


def _unknown(kind: Any) -> OptionError:
    return OptionError(
        f"drafter.layer is of model type {kind!r}; mtp needs a layer of the target's own kind, of "
        "a model that is part of transformers: use eagle3."
    )


def own_target_layer(config: dict[str, Any]) -> PreTrainedModel:
    """The model of such a layer with the norm after it, read by `inputs_embeds` alone.

    Raises:
        OptionError: see `layer_config`; or the layer is recurrent.
    """
    kind, made = config.get("model_type"), layer_config(config)
    try:
        model: Any = AutoModel.from_config(made, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        raise _unknown(kind) from error
    if recurrent_layers(model.config):
        raise _recurs(kind)
    model.set_input_embeddings(nn.Identity())
    return model


class Readable(nn.Module):
    """Such a layer as a language model that reads made-up embeddings and writes its states.

    It is what the trial of a language model asks for: `input_ids` in, `logits` out.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        size = self.config.get_text_config(decoder=True).hidden_size
        made_up = torch.randn(_IDS, size, generator=torch.Generator().manual_seed(0))
        inputs = made_up.to(self.model.device, self.model.dtype)[input_ids]
        found = self.model(inputs_embeds=inputs, **options)
        found["logits"] = found.last_hidden_state
        return found
