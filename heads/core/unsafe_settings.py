"""Settings of a `config.json` by which transformers loads more than the weights beside it."""

from collections.abc import Iterator
from typing import Any

_UNSAFE = {
    "auto_map", "transformers_weights", "quantization_config", "compression_config",
    "attn_implementation", "experts_implementation", "kernel_config", "backbone",
    "attribute_map",  # it gives any of these another name
}  # fmt: skip


def without_unsafe(config: dict[str, Any]) -> dict[str, Any]:
    """A config without those of these settings that stand at its top level."""
    left_out = {key for _, key, _ in unsafe_settings(config)}
    return {key: value for key, value in config.items() if key not in left_out}


def unsafe_settings(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Settings, at any depth, with which transformers imports or fetches code, or reads files.

    They are found with underscores around them and as `…_internal` too.

    Yields:
        What such a setting is called, its key as it is there, and its value, which is not None.
    """
    nested = [config]
    while nested:
        value = nested.pop()
        if isinstance(value, dict):
            for key, found in value.items():
                name = str(key).strip("_").removesuffix("_internal")
                if name in _UNSAFE and found is not None:
                    yield name, str(key), found
            nested += value.values()
        elif isinstance(value, list):
            nested += value
