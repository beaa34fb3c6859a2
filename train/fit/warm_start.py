"""Warm start: a drafter whose first weights are those of another head of its family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from transformers import AutoConfig

from headstart.heads import OptionError, TrainableDrafter
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.core import load_pretrained
from headstart.heads.declared.pard import PARALLEL
from headstart.heads.families import with_article

from ..recipe import DrafterSpec

_LIKE = ("feature_layers", "layer", "mask_token_id", "norm_before_residual", "norm_output")
"""Settings of a config that weights were trained for, though their shapes do not show them."""

_LIKE_MODELS = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rope_parameters", "layer_types", "sliding_window", PARALLEL,
)  # fmt: skip
"""The same of language models."""


def going_on(drafter: DrafterSpec, before: str) -> tuple[DrafterSpec, str | None]:
    """How a recipe's drafter goes on from an artifact of it: the drafter, and `train.from`."""
    if drafter.options.get("lora") is None:
        return drafter, before
    # Its factors were merged into the student, which gets new ones.
    options = {key: value for key, value in drafter.options.items() if key != "layers"}
    return replace(drafter, options=options | {"model": before}), None


def start_from(name: str, drafter: TrainableDrafter) -> str:
    """Copy the weights of a head into a drafter; returns where it came from, with its commit.

    The head may have been trained for another target, such as an earlier version of this one.

    Args:
        name: the folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub, of an artifact.

    Raises:
        OptionError: it is no artifact, of another family, or its weights or settings differ.
        ArtifactError: there is none, or its files are damaged.
    """
    source, family = DrafterSource(name), drafter.config.family_name()
    if source.kind is not SourceKind.ARTIFACT:
        raise _unlike(
            name, f"is {source.kind}", f"{with_article(family)} head that headstart saved"
        )
    if source.manifest.family != family:
        raise _unlike(
            name, f"is {with_article(source.manifest.family)} head", f"{with_article(family)} head"
        )
    if getattr(drafter.config, "lora", None) is not None:
        raise _unlike(name, "comes with drafter.lora", "drafter.model to name it")
    if drafter.adapter is not None:
        raise _unlike(name, "has an adapter", "a family that leaves its target as it is")
    found = safetensors.torch.load_file(source.check_files())
    model: Any = drafter.model if drafter.saved_as_language_model else drafter
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    own = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    shapes = [
        {key: tuple(tensor.shape) for key, tensor in some.items() if key not in tied}
        for some in (found, own)
    ]
    for key in sorted({*shapes[0], *shapes[1]}):
        theirs, mine = (some.get(key, "nothing") for some in shapes)
        if theirs != mine:
            raise _unlike(name, f"has {theirs} at {key}", f"{mine}, as the recipe's drafter has")
    _take_settings(name, drafter, source)
    if drafter.device.type != "meta":  # which only shows whether they fit
        with torch.no_grad():
            drafter.load_state_dict(found)
    return source.origin


def _take_settings(name: str, drafter: TrainableDrafter, source: DrafterSource) -> None:
    """Compare what the head was trained with; take over what belongs to its weights."""
    theirs: Any
    mine: Any = drafter.config
    if drafter.saved_as_language_model:
        theirs, mine = load_pretrained(AutoConfig, source.folder), drafter.model.config  # type: ignore[union-attr]
    else:
        theirs = type(drafter).config_class.from_pretrained(source.folder)  # type: ignore[union-attr]
    for key in _LIKE_MODELS if drafter.saved_as_language_model else _LIKE:
        one, two = (getattr(config, key, None) for config in (theirs, mine))
        one, two = (list(v) if isinstance(v, tuple) else v for v in (one, two))
        if one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):  # what they share would hide the rest
            other = [part for part in sorted({*one, *two}) if one.get(part) != two.get(part)]
            one, two = ({part: each.get(part) for part in other} for each in (one, two))
        raise _unlike(name, f"has {key} {one}", f"{two}, as the recipe's drafter has")
    if hasattr(mine, "embedding_scale"):  # Hydra's, found when its training started
        mine.embedding_scale = theirs.embedding_scale


def _unlike(name: str, found: str, expected: str) -> OptionError:
    return OptionError(f"train.from: {name} {found}, expected {expected}.")
