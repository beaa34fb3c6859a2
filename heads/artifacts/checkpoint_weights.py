"""The weights of another trainer's checkpoint: in which files they are, and their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..core import ArtifactError
from .files import INDEX, pickled, read_json, single_weights
from .source import DrafterSource

_SAFE = ".safetensors"

HEADS_INSIDE = ("medusa_num_heads", "hydra_num_heads")
"""Fields of a language model's config which say that the model holds a drafter's heads."""


def weights_files(source: DrafterSource, config: dict[str, Any]) -> list[Path]:
    """The files of a checkpoint that may hold a drafter; none for a model in several files.

    Raises:
        ArtifactError: a pickle that the source does not allow, or a file that is missing.
    """
    chosen = single_weights(source.files)
    if not chosen and INDEX in source.files and any(key in config for key in HEADS_INSIDE):
        chosen = _shards(source)
    if (pickles := pickled(chosen)) and not source.allow_pickle:
        raise ArtifactError(
            f"{source} holds its weights in {pickles[0]}, a pickle, which can run any code; ask "
            "for safetensors, or have its tensors alone read with allow_pickle=True "
            "(--allow-pickle)."
        )
    return [source.folder / file for file in chosen]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Raises:
        ArtifactError: it is damaged, or holds something else.
    """
    try:
        if file.suffix == _SAFE:
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged pickle
        raise ArtifactError(
            f"{file} holds more than tensors, or is damaged, and is not read; ask for "
            "safetensors, or download it again."
        ) from error
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ArtifactError(
            f"{file} holds a {type(tensors).__name__}, expected tensors by name; export the "
            "state dict of the heads alone."
        )
    return tensors


def _shards(source: DrafterSource) -> list[str]:
    """The files that the index names, each of them in the folder itself."""
    index = read_json(source.folder / INDEX).get("weight_map")
    files = list(index.values()) if isinstance(index, dict) else [index]
    for file in files:
        if file not in source.files or Path(file).name != file or Path(file).suffix != _SAFE:
            raise ArtifactError(
                f"{source} has a {INDEX} that names {file!r}, which is not there; download both "
                "again."
            )
    return sorted(set(files))
