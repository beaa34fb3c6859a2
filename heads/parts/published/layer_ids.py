"""The two ways in which configs name the layers whose hidden states a drafter reads.

The hidden state between two layers is the output of one and the input of the next, so each project
counts it by one of them:

    counted by          where
    the layer's input   `feature_layers` here; vLLM's and speculators' `eagle_aux_hidden_state_
                        layer_ids` at the top of a config
    the layer's output  `eagle_config.eagle_aux_hidden_state_layer_ids`, as SpecForge writes and
                        SGLang reads it; `target_layer_ids` of block drafters
"""

from collections.abc import Mapping, Sequence
from typing import Any

_AUX = "eagle_aux_hidden_state_layer_ids"


def read_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """The layers whose input is read, by a config of either kind; empty where it names none.

    >>> read_layer_ids({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}})
    [2, 16, 29]
    """
    outputs = (config.get("eagle_config") or {}).get(_AUX) or []
    return list(config.get(_AUX) or [layer + 1 for layer in outputs])


def ids_by_input(layers: Sequence[int]) -> dict[str, Any]:
    """The config's entry that vLLM and speculators read."""
    return {_AUX: list(layers)}


def ids_by_output(layers: Sequence[int]) -> dict[str, Any]:
    """The config's entry that SGLang reads.

    >>> ids_by_output([2, 16, 29])["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    [1, 15, 28]
    """
    outputs = [layer - 1 for layer in layers]
    return {"eagle_config": {_AUX: outputs, "use_aux_hidden_state": True}}
