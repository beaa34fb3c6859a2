"""Whether an artifact's weights are those that its config declares, from names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..core import ArtifactError
from ..drafter import DrafterConfig
from ..families import family
from .files import CONFIG, MALFORMED, WEIGHTS, brief, read_header, read_json
from .settings import check_known
from .source import DrafterSource


def read_config(source: DrafterSource) -> DrafterConfig:
    """The config of an artifact.

    Raises:
        ArtifactError: settings that the family does not have, values of the wrong kind, or numbers
            that no drafter has.
    """
    drafter = family(source.manifest.family)
    kind: Any = drafter.config_class
    place = source.folder / CONFIG
    if not drafter.saved_as_language_model:
        check_known(place, read_json(place), kind)
    try:
        config = kind.from_pretrained(source.folder, local_files_only=True)
        if not all(type(layer) is int for layer in config.feature_layers):
            raise TypeError("feature_layers is no list of whole numbers")
        read, expected = len(config.feature_layers), len(kind.feature_layers)
        if "feature_layers" not in kind.OPTIONS and read != expected:
            raise ValueError(f"it names {read} feature_layers, expected {expected}")
    except (*MALFORMED, StrictDataclassError, OSError) as error:
        raise ArtifactError(
            f"{place} cannot be used ({brief(error)}); restore it or train again."
        ) from error
    return config


def check_declared(source: DrafterSource, weights: Path) -> None:
    """An ArtifactError where safetensors differ from the config in a tensor's name or shape.

    No tensor is read or made. A language model as drafter, and a pickle, are checked when loaded.
    """
    kind: Any = family(source.manifest.family)
    if kind.saved_as_language_model or weights.name != WEIGHTS:
        return
    config = read_config(source)
    found = {name: tensor["shape"] for name, tensor in read_header(weights).items()}
    try:
        wrong = first_difference(kind, config, found)
    except MALFORMED as error:
        raise ArtifactError(
            f"{source.folder / CONFIG} describes no {source.manifest.family} ({brief(error)}); "
            "restore it or train again."
        ) from error
    if wrong is not None:
        name, has, wanted = wrong
        raise ArtifactError(
            f"{weights} does not fit {source.folder / CONFIG}: {brief(name, 80)} is {has}, "
            f"expected {wanted}; restore both files."
        )


def first_difference(
    kind: Any, config: Any, found: Mapping[str, list[int]]
) -> tuple[str, list[int] | str, list[int] | str] | None:
    """The first tensor, by name, whose shape is not that of a drafter of this config.

    Returns:
        Its name, its shape or `missing`, and the shape expected or `none`; None where all fit.
    """
    with torch.device("meta"):
        expected = {name: list(t.shape) for name, t in kind(config).state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name, found.get(name, "missing"), expected.get(name, "none")
    return None
