"""Copies of a target's checkpoint with a drafter's tensors among its own, as engines read them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..core import ArtifactError
from ..parts.published.checkpoint import TargetModule
from .files import CONFIG, MODEL_FILES, read_json, write_json
from .manifest import commit_of


def write_with_module(target: PreTrainedModel, module: TargetModule, folder: Path) -> None:
    """Write a target's own files into a folder, with a module in place of the one that they hold.

    They are copied, so that what is done to the new ones later leaves the target's as they are.

    Raises:
        ArtifactError: the target has no files in safetensors, or the disk has no space for them.
    """
    source = _own_files(target)
    index, single = source / SAFE_WEIGHTS_INDEX_NAME, source / SAFE_WEIGHTS_NAME
    if index.is_file():
        files = sorted({Path(file).name for file in read_json(index)["weight_map"].values()})
    elif single.is_file():
        files = [SAFE_WEIGHTS_NAME]
    else:
        raise ArtifactError(
            f"{source} holds no weights in safetensors to put the module into; save the target by "
            "save_pretrained, and load the drafter with that."
        )
    _check_space(source, files, folder)
    for path in source.iterdir():
        if path.is_file() and path != index and any(fnmatch(path.name, p) for p in MODEL_FILES):
            shutil.copyfile(path, folder / path.name)
    config = read_json(folder / CONFIG)
    of_text = config if module.top else config.get("text_config", config)
    of_text.update(module.settings)
    write_json(folder / CONFIG, config)

    places: dict[str, str] = {}
    parts = [source / file for file in files]
    for number, old in enumerate(tqdm(parts, "copied files of weights", unit="file"), 1):
        new = folder / f"model-{number:05}-of-{len(parts) + 1:05}.safetensors"
        places |= dict.fromkeys(_copy_without(module.prefix, old, new), new.name)
    new = folder / f"model-{len(parts) + 1:05}-of-{len(parts) + 1:05}.safetensors"
    places |= dict.fromkeys(save_tensors(module.tensors, new), new.name)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)


def in_folder(target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The target as it would be loaded from a copy of its files; weights and modules are shared."""
    copied = copy.copy(target)
    copied.name_or_path = str(folder)
    return copied


def _own_files(target: PreTrainedModel) -> Path:
    name = str(target.name_or_path)
    if Path(name).is_dir():
        return Path(name)
    patterns = [*MODEL_FILES, "*.safetensors"]
    revision = commit_of(target) or None
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _check_space(source: Path, files: list[str], folder: Path) -> None:
    needed = sum((source / file).stat().st_size for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            f"a copy of the target takes {needed / 1e9:.1f} GB, and the disk of {folder.parent} "
            f"has {free / 1e9:.1f} GB; choose another one."
        )


def _copy_without(prefix: str, old: Path, new: Path) -> list[str]:
    """Copy a file of weights without the tensors of a prefix; returns the names of the others.

    Where there is no other one, nothing is written.
    """
    with safe_open(old, "pt") as file:
        names: list[str] = list(file.keys())
        kept = [name for name in names if not name.startswith(prefix)]
        if kept != names:
            return save_tensors({name: file.get_tensor(name) for name in kept}, new)
    shutil.copyfile(old, new)
    return kept


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> list[str]:
    """Write tensors, which may share memory, unless there are none; returns their names."""
    if tensors:
        own = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, path, {"format": "pt"})
    return list(tensors)
