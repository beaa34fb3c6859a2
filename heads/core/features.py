"""A model's hidden states, captured by hooks while it runs: the features that drafters read."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import OptionError, UnsupportedTarget

FINAL = -1
"""Feature layer: the hidden state after the last norm, which the output layer reads."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a causal language model."""
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedTarget(
        f"{model.config.model_type} has no list of {wanted} decoder layers to take features from; "
        "use a drafter that reads only the final hidden state."
    )


class FeatureTap(AbstractContextManager):
    """Captures hidden states of a model by hooks, while forwards run.

    Layer i ≥ 0 means the hidden state that enters decoder layer i; `FINAL` the one after the last
    norm. Hooks do not depend on the order of `output_hidden_states`, which differs by release. They
    are there from the start until `close`, or until a `with` block ends.

    Raises:
        OptionError: the model has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self._captured: dict[int, Tensor] = {}
        self._order = tuple(layers)
        self._handles = []
        stack = decoder_layers(model) if any(layer != FINAL for layer in layers) else ()
        for layer in set(layers):
            if layer != FINAL and not 0 <= layer < len(stack):
                raise OptionError(
                    f"feature layer {layer} does not exist; expected 0 … {len(stack) - 1}, or "
                    f"{FINAL} for the final hidden state."
                )
            if layer == FINAL:
                hook = model.get_decoder().register_forward_hook(self._keep_output)
            else:
                keep = partial(self._keep_input, layer)
                hook = stack[layer].register_forward_pre_hook(keep, with_kwargs=True)
            self._handles.append(hook)

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _keep_output(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._captured[FINAL] = output[0]

    def _keep_input(self, layer: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._captured[layer] = args[0] if args else kwargs["hidden_states"]

    def take(self) -> Tensor:
        """Features [B, T, F] of the last forward, F = layers × D, in the order asked for."""
        if len(self._order) == 1:
            return self._captured[self._order[0]]
        device = self._captured[self._order[0]].device
        return torch.cat([self._captured[layer].to(device) for layer in self._order], dim=-1)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def capture(model: PreTrainedModel, layers: Sequence[int], tokens: Tensor) -> Tensor:
    """Features [B, T, F] of tokens [B, T], by one forward of the decoder; F is 0 for no layers."""
    if not layers:
        return torch.empty(*tokens.shape, 0, device=tokens.device)
    with FeatureTap(model, layers) as tap:
        model.get_decoder()(input_ids=tokens, use_cache=False)
        return tap.take()
