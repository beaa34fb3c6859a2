"""Whether an artifact's config and weights are those of its family, from names and shapes alone.

Of a family whose config is `declared` nothing is imported for it, and of any other its class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ..core import ArtifactError, brief
from ..declared.fields import Fields, Shapes
from ..declared.pard import AT_ONCE, FAMILY, PARALLEL
from ..families import declared_by, family, is_language_model
from .files import CONFIG, MALFORMED, WEIGHTS, read_header, read_json
from .source import DrafterSource, SourceKind

_WRITTEN = {
    "_name_or_path": str, "architectures": list, "dtype": str, "model_type": str,
    "torch_dtype": str, "transformers_version": str,
}  # fmt: skip
"""What transformers writes into every config, beside the settings that a family declares."""


def read_config(source: DrafterSource) -> Any:
    """The settings of an artifact: its family's `Fields`, or else its config.

    Raises:
        ArtifactError: settings that the family does not have, values of the wrong kind, or numbers
            that no drafter has.
    """
    place, kind = source.folder / CONFIG, declared_by(source.manifest.family)
    try:
        if kind is None:
            return _read_by_class(source)
        read = read_json(place)
        values = _known(place, read, kind)
        config = _strict(kind)(**values)
        if not all(type(layer) is int for layer in config.feature_layers):
            raise TypeError("feature_layers is no list of whole numbers")
        found, expected = len(config.feature_layers), len(kind.feature_layers)
        if "feature_layers" not in kind.OPTIONS and found != expected:
            raise ValueError(f"it names {found} feature_layers, expected {expected}")
    except ArtifactError:
        raise
    except (*MALFORMED, StrictDataclassError, OSError) as error:
        raise ArtifactError(
            f"{place} cannot be used ({brief(error)}); restore it or train again."
        ) from error
    return config


def declared_depth(source: DrafterSource) -> int | None:
    """The deepest level that a drafter can propose for, as far as its config says without torch.

    A language model drafts as many tokens at once as its config says, and else any number.

    Raises:
        ArtifactError: an artifact whose config cannot be used.
    """
    if source.kind not in (SourceKind.ARTIFACT, SourceKind.CHECKPOINT):
        return None
    if source.kind is SourceKind.ARTIFACT:
        if declared_by(source.manifest.family) is not None:
            return read_config(source).max_depth
        if source.manifest.family != FAMILY:
            return None
    config = read_json(source.folder / CONFIG)
    said = config.get(AT_ONCE) if PARALLEL in config else None
    return said if type(said) is int else None


def _read_by_class(source: DrafterSource) -> Any:
    kind: Any = family(source.manifest.family).config_class
    return kind.from_dict(read_json(source.folder / CONFIG))


def _known(place: Path, config: Mapping[str, Any], kind: type[Fields]) -> dict[str, Any]:
    """The settings that a family declares; an ArtifactError where there are others."""
    declared = {field.name for field in dataclasses.fields(kind)}
    given = {key for key, value in config.items() if value is not None}
    if unknown := sorted(given - declared - _WRITTEN.keys()):
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        raise ArtifactError(
            f"{place} sets {brief(unknown[0], 80)}{more}, which no {config['model_type']} has; "
            "remove that, or use the drafter with the version of headstart that saved it."
        )
    for name, expected in _WRITTEN.items():
        if name in given and type(config[name]) is not expected:
            raise TypeError(f"{name} is {brief(repr(config[name]), 60)}")
    return {key: config[key] for key in declared & config.keys()}


@cache
def _strict(kind: type[Fields]) -> Any:
    """The same, with types and ranges checked as the family's own config checks them."""
    return strict(type(kind.__name__, (kind,), {}))


def check_declared(source: DrafterSource, weights: Path) -> None:
    """An ArtifactError where safetensors differ from the config in a tensor's name or shape.

    No tensor is read or made. A language model as drafter, and a pickle, are checked when loaded.
    """
    name, place = source.manifest.family, source.folder / CONFIG
    if weights.name != WEIGHTS or is_language_model(name):
        return
    config = read_config(source)
    found = {name: tensor["shape"] for name, tensor in read_header(weights).items()}
    try:
        wrong = first_difference(expected_shapes(name, config), found)
    except (*MALFORMED, StrictDataclassError) as error:
        raise ArtifactError(
            f"{place} describes no {name} ({brief(error)}); restore it or train again."
        ) from error
    if wrong is not None:
        tensor, has, wanted = wrong
        raise ArtifactError(
            f"{weights} does not fit {place}: {brief(tensor, 80)} is {has}, expected {wanted}; "
            "restore both files."
        )


def expected_shapes(name: str, config: Any) -> Shapes:
    """The tensors of a drafter of a family and a config, or its `Fields`, by name.

    Where the settings alone do not decide whether there is such a drafter, it is made without
    memory for its tensors.

    Raises:
        one of MALFORMED: there is no such drafter.
    """
    kind = declared_by(name)
    shapes = None if kind is None else config.shapes()
    if shapes is not None and config.decided:
        return shapes
    import torch

    drafter: Any = family(name)
    if not isinstance(config, drafter.config_class):
        config = drafter.config_class(**vars(config))
    with torch.device("meta"):
        return {name: list(t.shape) for name, t in drafter(config).state_dict().items()}


def first_difference(
    expected: Shapes, found: Mapping[str, list[int]]
) -> tuple[str, list[int] | str, list[int] | str] | None:
    """The first tensor, by name, whose shape is not the expected one.

    Returns:
        Its name, its shape or `missing`, and the shape expected or `none`; None where all fit.
    """
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name, found.get(name, "missing"), expected.get(name, "none")
    return None
