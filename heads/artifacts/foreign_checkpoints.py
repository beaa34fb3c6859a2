"""Loading of drafters that headstart did not save: checkpoints of other trainers.

A checkpoint is a folder or Hub repository with a `config.json` and one file of weights
(see `HEADS`), or a whole model that holds the heads, in one or several files. The first family
whose `Drafter.from_checkpoint` knows the tensors loads it. Nothing in it proves which target it was
trained for, so only its shapes are checked: with another target of the same shapes it drafts
badly, and the output is the target's all the same. What no family knows may be a language model,
which then is the draft model.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from ..drafter import Drafter, DrafterConfig
from ..families import FAMILIES, family
from .checkpoint_weights import HEADS_INSIDE, read_tensors, weights_files
from .files import CONFIG, HEADS, PICKLE, WEIGHTS, read_json
from .language_models import load_language_model
from .source import DrafterSource

logger = logging.getLogger(__name__)


def load_checkpoint(
    source: DrafterSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> Drafter:
    """Load another trainer's drafter, or a language model as the draft model; neither is bound yet.

    Args:
        tokenizer: of the target; loaded where a language model needs it and it is not given.
        options: passed to `from_pretrained`.

    Raises:
        ArtifactError: it is neither, does not fit the target, or is pickled and not allowed.
    """
    config = read_json(source.folder / CONFIG)
    files = weights_files(source, config)
    found = _recognised(config, files) if files else None
    if found is None:
        _check_model(source, config, files)
        return load_language_model(source, target, tokenizer, options)
    kind, fields, tensors = found
    drafter_config = _config(kind, fields, target, source)
    _check_shapes(kind, drafter_config, tensors, source)
    drafter: Any = kind.from_pretrained(None, config=drafter_config, state_dict=tensors, **options)
    base = config.get("base_model_name_or_path")
    named = f"; its config names {base}" if isinstance(base, str) else ""
    logger.warning(
        "Only shapes show that %s was trained for this target%s: where it was not, τ stays near 1, "
        "and the output is the target's all the same.",
        source,
        named,
    )
    return drafter


def _recognised(
    config: dict[str, Any], files: list[Path]
) -> tuple[type[Drafter], dict[str, Any], dict[str, Tensor]] | None:
    """The family that knows these tensors, and what its `from_checkpoint` returns."""
    tensors = {key: tensor for file in files for key, tensor in read_tensors(file).items()}
    for name in FAMILIES:
        try:
            found = family(name).from_checkpoint(config, tensors)
        except ArtifactError as error:
            raise ArtifactError(f"{files[0]} is not read: {error}") from error
        except RuntimeError as error:  # torch's, for tensors of shapes that do not go together
            reason = " ".join(str(error).split())[:160]
            raise ArtifactError(
                f"{files[0]} looks like one of {name}, and its tensors do not fit together "
                f"({reason}); download it again."
            ) from error
        if found is not None:
            return family(name), *found
    return None


def _config(
    kind: type[Drafter], fields: dict[str, Any], target: PreTrainedModel, source: DrafterSource
) -> DrafterConfig:
    """The family's config for a target, with the fields that the checkpoint sets.

    Raises:
        ArtifactError: the checkpoint was made for a target of other shapes.
    """
    text = target.config.get_text_config(decoder=True)
    for field, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        found, expected = fields.get(field), getattr(text, field)
        if found is not None and found != expected:
            raise ArtifactError(
                f"{source} was trained for a target of {what} {found}, and this one's is "
                f"{expected}; load the target that it was trained for."
            )
    config_class: Any = kind.config_class
    options = {field: fields[field] for field in fields if field in config_class.OPTIONS}
    config = config_class.for_target(target, **options)
    for field in fields.keys() - options.keys():
        try:
            setattr(config, field, fields[field])
        except StrictDataclassError as error:
            raise ArtifactError(
                f"{source} says {field} {fields[field]!r}, which is of another kind than expected; "
                "correct its config.json."
            ) from error
    return config


def _check_shapes(
    kind: type[Drafter], config: DrafterConfig, tensors: dict[str, Tensor], source: DrafterSource
) -> None:
    """Refuse a tensor that is missing, unknown or of another shape.

    Raises:
        ArtifactError: the first of them by name.
    """
    with torch.device("meta"):
        expected = {key: list(t.shape) for key, t in kind(config).state_dict().items()}
    found = {key: list(tensor.shape) for key, tensor in tensors.items()}
    for key in sorted(expected.keys() | found.keys()):
        if found.get(key) != expected.get(key):
            raise ArtifactError(
                f"{source} does not fit as {config.family_name()}: found "
                f"{key} {found.get(key, 'missing')}, expected {expected.get(key, 'none')}; load "
                "the target that it was trained for."
            )


def _check_model(source: DrafterSource, config: dict[str, Any], files: list[Path]) -> None:
    """Refuse what no family knows, unless it may be a language model.

    Raises:
        ArtifactError: its file of weights or its config is a drafter's, or of no known model.
    """
    if any(file.name in HEADS and file.name not in (WEIGHTS, PICKLE) for file in files):
        what = f"its {files[0].name} has tensors that no family here knows"
    elif inside := [key for key in HEADS_INSIDE if key in config]:
        what = f"its config has {inside[0]}, and no weights of such heads were found in safetensors"
    elif config.get("model_type") not in CONFIG_MAPPING:
        found = f"a {files[0].name} of another kind" if files else "no file of weights"
        what = f"its model type is {config.get('model_type')!r}, with {found}"
    else:
        return
    known = ", ".join(name for name in FAMILIES if not family(name).weightless)
    raise ArtifactError(
        f"{source} is no drafter that can be read: {what}; expected an artifact of headstart, a "
        f"language model, or another's checkpoint of one of: {known}."
    )
