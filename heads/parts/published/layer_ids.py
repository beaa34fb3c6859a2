"""The two ways in which configs name the layers whose hidden states a drafter reads.

The hidden state between two layers is the output of one and the input of the next, so each project
counts it by one of them:

    counted by          where
    the layer's input   `feature_layers` here; vLLM's and speculators' `eagle_aux_hidden_state_
                        layer_ids` or `aux_hidden_state_layer_ids` at the top of a config
    the layer's output  `eagle_config.eagle_aux_hidden_state_layer_ids`, as SpecForge writes and
                        SGLang reads it; `target_layer_ids` of block drafters, in
                        `dflash_config` or at the top; AngelSlim's
                        `aux_hidden_states_layer_ids` at the top
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core import FINAL, ArtifactError, brief

_AUX = "eagle_aux_hidden_state_layer_ids"
_INPUTS, _OUTPUTS = (_AUX, "aux_hidden_state_layer_ids"), (_AUX, "target_layer_ids")
_OUTPUTS_AT_TOP = ("target_layer_ids", "aux_hidden_states_layer_ids")


def read_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """The layers whose input is read, by a config of either kind; empty where it names none.

    >>> read_layer_ids({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}})
    [2, 16, 29]
    """
    if inputs := next((config[key] for key in _INPUTS if config.get(key)), None):
        return _checked(inputs, 0)
    inner = config.get("eagle_config") or config.get("dflash_config") or {}
    said = [inner.get(key) for key in _OUTPUTS] + [config.get(key) for key in _OUTPUTS_AT_TOP]
    return _checked(next(filter(None, said), []), 1)


def _checked(layers: Any, added: int) -> list[int]:
    """The layers by their input, which is what is `added` to the numbers that a config names."""
    numbers = isinstance(layers, list | tuple) and all(type(each) is int for each in layers)
    if not numbers or min(layers, default=0) + added < 0:
        raise ArtifactError(
            f"its config names the layers {brief(repr(layers), 80)} of the target; expected a list "
            f"of whole numbers, at least {-added}."
        )
    return [each + added for each in layers]


def published_layers(count: int) -> list[int]:
    """The layers whose input EAGLE-3's authors read of a target of so many layers.

    Raises:
        ArtifactError: the target is too small to have them.
    """
    layers = [2, count // 2, count - 3]
    if count < 3:
        raise ArtifactError(
            f"its config names no layers of the target, which are then {layers}, and this target "
            f"has {count}; add {_AUX} to its config.json."
        )
    return layers


def check_layer_ids(layers: Sequence[int], count: int) -> None:
    """An ArtifactError where a layer whose input is read is none of a target of so many layers.

    What would enter one more layer is what leaves the last, which can be read too.
    """
    for layer in layers:
        if layer != FINAL and not 0 <= layer <= count:
            raise ArtifactError(
                f"it reads the input of layer {layer} of its target (the output of layer "
                f"{layer - 1}), and this target has the layers 0 … {count - 1}; load the target "
                "that it was trained for, or correct the layer ids in its config.json."
            )


_SORTED = ("vllm", "speculators", "sglang", "tensorrt-llm")
"""Forms whose engines hand over each layer's state once, in the order of the layers."""


def check_writable(drafter: Any, form: str, block: bool = False) -> None:
    """An ArtifactError where a form's engine would hand over other states of the target.

    vLLM and TensorRT-LLM sort the layers, and SGLang collects the states while it runs them. SGLang
    does not collect the last layer's output; it and TensorRT-LLM count by outputs, and the input
    of the first layer is none of them. The code of EAGLE-3's authors has its three layers written
    into it, and collects each once.

    Args:
        drafter: bound to its target.
        block: whether it is a block drafter. SGLang has the first layer's input for others alone;
            others leave out `fc` in it and in TensorRT-LLM, where they read a single layer.
    """
    layers = list(drafter.config.feature_layers)
    count = drafter.target.config.get_text_config(decoder=True).num_hidden_layers
    if FINAL in layers:
        what = "what the target's last norm returns"
    elif form in _SORTED and layers != sorted(set(layers)):
        what = f"the inputs of the layers {layers}, and gets each once, in ascending order"
    elif form == "original" and not block and layers != sorted({2, count // 2, count - 3}):
        what = (
            f"the inputs of the layers {layers}, and gets those of 2, L/2 and L - 3 of L layers "
            f"(here 2, {count // 2} and {count - 3}), each once"
        )
    elif 0 in layers and (form == "tensorrt-llm" or (form == "sglang" and block)):
        what = "the input of the first layer, which it does not get there"
    elif count in layers and form == "sglang":
        what = "the output of the last layer, which it does not get there"
    elif len(layers) < 2 and not block and form in ("sglang", "tensorrt-llm"):
        what = "a single layer, whose state is not put through fc there"
    else:
        return
    raise ArtifactError(
        f"{form} cannot run this drafter: it reads {what}; decode with it here, or train it with "
        "other drafter.feature_layers."
    )


READS_FINAL_STATE: dict[str, Any] = {"eagle_config": {"use_aux_hidden_state": False}}
"""The config's entry of a head that reads what the target's last norm returns."""


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
