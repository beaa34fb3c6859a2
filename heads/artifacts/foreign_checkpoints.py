"""Drafters that others trained: checkpoints of the methods' authors, read as our families.

A folder or Hub repository with a `config.json` and one file of weights, see `HEADS`, and without
our manifest; or a whole model with heads inside, which may be in several files. Each family is
asked whether it is one of its own, see `Drafter.from_checkpoint`. Nothing there proves which target
it was trained for, so its shapes are all that is checked: for another target of the same shape it
drafts badly, and the output is that target's all the same.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..core import ArtifactError
from ..drafter import Drafter, DrafterConfig
from ..families import FAMILIES, family
from .files import CONFIG, PICKLE, WEIGHTS, read_json
from .hub import download, file_names

logger = logging.getLogger(__name__)

HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt", WEIGHTS, PICKLE)
"""The files of weights that a drafter may have; the first that is there is read."""

_SHARDS = WEIGHTS + ".index.json"
_INSIDE = ("medusa_num_heads", "hydra_num_heads")  # what says that a model's config is a drafter's


def load_foreign(
    name: str | Path, target: PreTrainedModel, allow_pickle: bool, options: dict[str, Any]
) -> Drafter | None:
    """A drafter that somebody else trained, not bound yet; None for a language model's checkpoint.

    Args:
        name: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub, see `is_foreign`.
        options: passed to `from_pretrained`.

    Raises:
        ArtifactError: it is no checkpoint that a family reads, not for this target, or pickled
            without `allow_pickle`.
    """
    folder = checkpoint_folder(name)
    said = read_json(folder / CONFIG)
    weights = _weights(name, folder, said, allow_pickle)
    found = _translate(said, weights) if weights else None
    if found is None:
        _check_model(name, said, weights)
        return None
    kind, known, tensors = found
    config = _config(kind, known, target, name)
    _check_tensors(kind, config, tensors, name)
    drafter: Any = kind.from_pretrained(None, config=config, state_dict=tensors, **options)
    base = said.get("base_model_name_or_path")
    named = f"; its config names {base}" if isinstance(base, str) else ""
    logger.warning(
        "Only shapes show that %s was trained for this target%s: where it was not, τ stays near 1, "
        "and the output is the target's all the same.",
        name,
        named,
    )
    return drafter


def checkpoint_folder(name: str | Path, file: str = CONFIG) -> Path:
    """The local folder that holds one file of a checkpoint: its own, or the cache's snapshot."""
    return Path(name) if Path(name).is_dir() else download(str(name), [CONFIG, file])


def _weights(
    name: str | Path, folder: Path, said: dict[str, Any], allow_pickle: bool
) -> list[Path]:
    """The files of weights; none where a language model has several, as they do not interest."""
    # Where the Hub cannot be asked, the cache tells what was fetched before.
    names = [] if Path(name).is_dir() else file_names(str(name))
    names = names or [path.name for path in folder.iterdir()]
    chosen = [file for file in HEADS if file in names][:1]
    if _SHARDS in names and chosen in ([], [PICKLE]):
        chosen = _shards(name, names) if any(key in said for key in _INSIDE) else []
    if any(not file.endswith(".safetensors") for file in chosen) and not allow_pickle:
        raise ArtifactError(
            f"{name} holds its weights in {chosen[0]}, a pickle, which can run any code; ask for "
            "safetensors, or have its tensors alone read with allow_pickle=True (--allow-pickle)."
        )
    return [checkpoint_folder(name, file) / file for file in chosen]


def _shards(name: str | Path, names: list[str]) -> list[str]:
    """The files that the index names, each of them in the folder itself."""
    index = read_json(checkpoint_folder(name, _SHARDS) / _SHARDS).get("weight_map")
    files = list(index.values()) if isinstance(index, dict) else [index]
    for file in files:
        if file not in names or Path(file).name != file or not file.endswith(".safetensors"):
            raise ArtifactError(
                f"{name} has a {_SHARDS} that names {file!r}, which is not there; download both "
                "again."
            )
    return sorted(set(files))


def _translate(
    said: dict[str, Any], weights: list[Path]
) -> tuple[type[Drafter], dict[str, Any], dict[str, Tensor]] | None:
    """The family that knows these weights, and what it makes of them."""
    tensors = {key: tensor for file in weights for key, tensor in _read(file).items()}
    for each in FAMILIES:
        kind = family(each)
        try:
            found = kind.from_checkpoint(said, tensors)
        except ArtifactError as error:
            raise ArtifactError(f"{weights[0]} is not read: {error}") from error
        except RuntimeError as error:  # torch's, of tensors that do not go together
            reason = " ".join(str(error).split())[:160]
            raise ArtifactError(
                f"{weights[0]} looks like one of {each}, and its tensors do not fit together "
                f"({reason}); download it again."
            ) from error
        if found is not None:
            return kind, *found
    return None


def _read(weights: Path) -> dict[str, Tensor]:
    try:
        if weights.suffix == ".safetensors":
            return load_file(weights)
        tensors = torch.load(weights, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # there is hardly one that torch does not raise on a torn pickle
        raise ArtifactError(
            f"{weights} holds more than tensors, or is damaged, and is not read; ask for "
            "safetensors, or download it again."
        ) from error
    whole = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not whole or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ArtifactError(
            f"{weights} holds a {type(tensors).__name__}, expected tensors by name; export the "
            "state dict of the heads alone."
        )
    return tensors


def _check_model(name: str | Path, said: dict[str, Any], weights: list[Path]) -> None:
    """Refuse what no family reads, unless it may be a language model.

    Raises:
        ArtifactError: its file, or its config, is a drafter's.
    """
    known = ", ".join(each for each in FAMILIES if not family(each).weightless)
    if any(file.name in HEADS and file.name not in (WEIGHTS, PICKLE) for file in weights):
        what = f"its {weights[0].name} has tensors that no family here knows"
    elif inside := [key for key in _INSIDE if key in said]:
        what = f"its config has {inside[0]}, and no weights of such heads were found in safetensors"
    elif said.get("model_type") not in CONFIG_MAPPING:
        found = f"a {weights[0].name} of another kind" if weights else "no file of weights"
        what = f"its model type is {said.get('model_type')!r}, with {found}"
    else:
        return
    raise ArtifactError(
        f"{name} is no drafter that can be read: {what}; expected an artifact of headstart, a "
        f"language model, or another's checkpoint of one of: {known}."
    )


def _config(
    kind: type[Drafter], known: dict[str, Any], target: PreTrainedModel, name: str | Path
) -> DrafterConfig:
    """The family's config for a target, with what the checkpoint knows.

    Raises:
        ArtifactError: it was made for a target of other shapes.
    """
    text = target.config.get_text_config(decoder=True)
    for field, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        found, wanted = known.get(field), getattr(text, field)
        if found is not None and found != wanted:
            raise ArtifactError(
                f"{name} was trained for a target of {what} {found}, and this one's is {wanted}; "
                "load the target that it was trained for."
            )
    config_class: Any = kind.config_class
    options = {field: known[field] for field in known if field in config_class.OPTIONS}
    config = config_class.for_target(target, **options)
    for field in known.keys() - options.keys():
        try:
            setattr(config, field, known[field])
        except StrictDataclassError as error:
            raise ArtifactError(
                f"{name} says {field} {known[field]!r}, which is of another kind than expected; "
                "correct its config.json."
            ) from error
    return config


def _check_tensors(
    kind: type[Drafter], config: DrafterConfig, tensors: dict[str, Tensor], name: str | Path
) -> None:
    """Refuse a tensor that is missing, unknown or of another shape: nothing is left to chance.

    Raises:
        ArtifactError: the first of them.
    """
    with torch.device("meta"):
        expected = {key: list(t.shape) for key, t in kind(config).state_dict().items()}
    found = {key: list(tensor.shape) for key, tensor in tensors.items()}
    for key in sorted(expected.keys() | found.keys()):
        if found.get(key) != expected.get(key):
            raise ArtifactError(
                f"{name} does not fit as {config.family_name()}: found "
                f"{key} {found.get(key, 'missing')}, expected {expected.get(key, 'none')}; load "
                "the target that it was trained for."
            )
