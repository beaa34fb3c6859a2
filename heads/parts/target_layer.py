"""A decoder layer of the target's own kind, for a drafter, and its module of the target's files."""

import copy
import json
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..core import OptionError
from ..core.unsafe_settings import without_unsafe
from .own_layers import layers_of

_IDS = 64
"""Token ids of the trial of such a layer, whose embeddings are made up."""

logger = logging.getLogger(__name__)


def target_layer(target: PreTrainedModel) -> dict[str, Any]:
    """The config of a model of one of the target's layers, as plain data.

    It is the layer of the target's own multi-token prediction where its config describes one, else
    as of `one_layer`.
    """
    text = target.config.get_text_config(decoder=True)
    if getattr(text, "num_mtp_layers", None):
        return _plain(layers_of(target.config.get_mtp_config(), [0]))
    return one_layer(text)


def one_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """The same of the last layer that attends to the whole text, of a language model's config.

    Raises:
        OptionError: every layer is recurrent, see `layers_of`.
    """
    types = getattr(config, "layer_types", None) or []
    whole = [number for number, kind in enumerate(types) if kind == "full_attention"]
    return _plain(layers_of(config, [max(whole, default=config.num_hidden_layers - 1)]))


def _plain(config: Any) -> dict[str, Any]:
    """A config as plain data without tokens, and without settings that load code or files."""
    config.vocab_size = _IDS
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "dtype"):
        setattr(config, name, None)
    found = json.loads(json.dumps(config.to_diff_dict(), default=str))  # as a file gives it back
    left_out = ("_name_or_path", "architectures", "transformers_version", "dtype")
    return {key: value for key, value in without_unsafe(found).items() if key not in left_out}


def _floats(value: Any) -> Any:
    """Plain data with the numbers for what transformers writes in their place in `config.json`.

    >>> _floats({"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    {'time_step_limit': [0.0, inf]}
    """
    if isinstance(value, list):
        return [_floats(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _floats(each) for key, each in value.items()}
    return value


def own_target_layer(config: dict[str, Any]) -> PreTrainedModel:
    """The model of such a layer with the norm after it, read by `inputs_embeds` alone.

    Raises:
        OptionError: it is of a kind that transformers does not have.
    """
    try:
        made = AutoConfig.for_model(**_floats(config))
        model: Any = AutoModel.from_config(made, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        raise OptionError(
            f"drafter.layer is of model type {config.get('model_type')!r}; mtp needs a layer of "
            "the target's own kind, of a model that is part of transformers: use eagle3."
        ) from error
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


def shipped_module(target: PreTrainedModel) -> Any:
    """The first layer of the multi-token prediction in a target's own files; None without one.

    Returns:
        A `MtpLayer` of transformers with a norm after it, in the target's dtype on the CPU.

    Raises:
        OptionError: it is of a kind that cannot be run.
    """
    text = target.config.get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None) or not target.name_or_path:
        return None
    # By these patterns transformers finds the weights, for layers of released checkpoints alone.
    layers = range(text.num_hidden_layers, text.num_hidden_layers + text.num_mtp_layers)
    known = target._keys_to_ignore_on_load_unexpected or []
    named: Any = copy.copy(target)
    named._keys_to_ignore_on_load_unexpected = [
        *known, *(rf"(^|\.)layers\.{n}\." for n in layers)
    ]  # fmt: skip
    try:
        module: Any = MtpModel.from_pretrained(named, device_map={"": "cpu"})
    except (RuntimeError, OSError, ValueError) as error:  # its files hold no such weights
        logger.info("%s has no module of its own: %s", target.name_or_path, str(error)[:200])
        return None
    layer = module.layers[0]
    if layer.post_norm is None:
        raise OptionError(
            f"{text.model_type} norms the states of its layers for multi-token prediction in "
            "another way than mtp does; train a drafter of another family, such as eagle3."
        )
    if len(module.layers) > 1:
        logger.warning(
            "%s has %d layers for multi-token prediction, one for each depth; the first drafts at "
            "every depth.", target.name_or_path, len(module.layers),
        )  # fmt: skip
    return layer
