"""A smaller model made of some layers of another, which is how a draft model may start."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..core import OptionError, decoder_layers, weight_of


def layers_of(config: PreTrainedConfig, chosen: Sequence[int]) -> PreTrainedConfig:
    """The config of a model made of some layers of another.

    Raises:
        OptionError: the model is more than its decoder.
    """
    if config.get_text_config(decoder=True) is not config:
        raise OptionError(
            f"{config.model_type} is more than a language model, so no student can be made of its "
            "layers; give drafter.model, a smaller model with the same tokenizer."
        )
    count, student = config.num_hidden_layers, copy.deepcopy(config)
    student.num_hidden_layers = len(chosen)
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(student, name, [value[layer] for layer in chosen])
    return student


@torch.no_grad()
def copy_layers(target: PreTrainedModel, student: PreTrainedModel, chosen: Sequence[int]) -> None:
    """Copy the chosen layers of a target to the student's, and all that is outside of layers."""
    layers = decoder_layers(target)
    prefix = next(name for name, module in target.named_modules() if module is layers)
    for name, tensor in student.state_dict().items():
        if name.startswith(f"{prefix}."):
            layer, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            name = f"{prefix}.{chosen[int(layer)]}.{rest}"
        module, _, name = name.rpartition(".")
        tensor.copy_(weight_of(target.get_submodule(module), name))
