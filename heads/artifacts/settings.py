"""Which settings of a language model's `config.json` its class knows; others go no further."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, modeling_rope_utils

from ..core import ArtifactError, brief
from ..declared.fields import MOST_PARTS
from .files import CONFIG, MALFORMED, read_json

# Of every config: what names its class, a type's old name, and what `check_settings` decides about.
_GENERAL = {"model_type", "torch_dtype", "quantization_config"}


def language_model_config(folder: Path) -> tuple[PreTrainedConfig, list[str]]:
    """The config of a causal language model, and the settings that were left out of it.

    What the class declares is passed on, and what the code of its own architecture names, as some
    do that read older configs. Other keys would be attributes that only transformers' loading could
    come to read.

    Raises:
        ArtifactError: the model type is not known, or a value is of the wrong kind.
    """
    config = read_json(folder / CONFIG)
    try:
        kind = CONFIG_MAPPING[config.get("model_type")]  # type: ignore[index]
        kept, left_out = _split(kind, config, "")
        made: Any = kind.from_dict(kept)
        if (layers := made.get_text_config(decoder=True).num_hidden_layers) > MOST_PARTS:
            raise ValueError(f"it has {brief(layers, 20)} layers, expected at most {MOST_PARTS}")
        return made, sorted(left_out)
    except (*MALFORMED, StrictDataclassError) as error:
        raise ArtifactError(
            f"{folder / CONFIG} cannot be used ({brief(error)}); expected that of a causal "
            "language model."
        ) from error


def _split(kind: Any, config: dict[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The settings that a class or its architecture knows, and the paths of the others."""
    kept, left_out = {}, []
    for key, value in config.items():
        inner = kind.sub_configs.get(key)
        if isinstance(value, dict) and inner is not None:
            inner = CONFIG_MAPPING.get(str(value.get("model_type")), inner)
            if hasattr(inner, "sub_configs"):
                value, more = _split(inner, value, f"{path}{key}.")
                left_out += more
        if _known(kind, key):
            kept[key] = value
        else:
            left_out.append(path + key)
    return kept, left_out


def _known(kind: Any, key: str) -> bool:
    if key in _GENERAL or key in _fields(kind) or key in kind.attribute_map:
        return True
    return key.isidentifier() and (f'"{key}"' in _code(kind) or f"'{key}'" in _code(kind))


@cache
def _fields(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


@cache
def _code(kind: Any) -> str:
    """The source of an architecture: its config, its model, and what they share on positions."""
    modules = [sys.modules[kind.__module__], modeling_rope_utils]
    name = kind.__module__.replace(".configuration_", ".modeling_")
    if name != kind.__module__:
        modules.append(import_module(name))
    return "\n".join(inspect.getsource(module) for module in modules)
