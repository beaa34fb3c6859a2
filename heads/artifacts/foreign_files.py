"""The files of what headstart did not save: which hold a drafter, and of which family it is.

A drafter's weights are in one file, or in several that an index lists; its heads may stand inside
of a whole model's weights, of which then nothing else is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..core import ArtifactError
from ..drafter import Drafter
from ..families import KNOWN, family
from ..parts.published.dflash import ARCHITECTURES
from ..parts.published.kangaroo import of_kangaroo
from .files import (
    INDEX,
    MALFORMED,
    MASK_EMBEDDING,
    WEIGHTS,
    brief,
    pickled,
    read_json,
    single_weights,
)
from .source import DrafterSource

HEADS_INSIDE = ("medusa_num_heads", "hydra_num_heads")
"""Fields of a language model's config which say that the model holds a drafter's heads."""

INSIDE = ("medusa_head.", "hydra_head.")
"""What names of a drafter's tensors begin with inside of a whole model."""

_OF_DRAFTERS = re.compile(
    r"(model\.|encoder\.)?(fc|fusion_fc|context_proj)\.weight|rnn_w\.weight|hydra_mlp\..*|lm_head\.0\.(linear\.)?weight"
    r"|\d+\.0\.linear\.weight|blocks\.0\.layers\.0\.weight"
    r"|(midlayer(\.0)?|(model\.)?layers\.0)\.hidden_norm\.weight|mtp_layers\.0\.input_proj\.weight"
    r"|pre_projection\.weight|(speculator\.)?(forget_)?emb\.0\.(0\.)?weight"
)
"""Names of tensors that a drafter has and no language model."""

_SPECULATORS = ("eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")
_BLOCKS = re.compile("DFlash|DSpark|JetSpec|Domino")


def recognise(
    source: DrafterSource, config: dict[str, Any]
) -> tuple[list[Path], tuple[type[Drafter], dict[str, Any], dict[str, Tensor]] | None]:
    """A checkpoint's files that may hold a drafter, and its family, fields and tensors.

    Returns:
        No files for a model in several; None where no family knows the tensors.

    Raises:
        ArtifactError: it is a drafter that no family runs, or damaged, or pickled and not allowed.
    """
    if kind := _not_run(config):
        raise ArtifactError(
            f"{source} is a drafter of another kind: its config calls it {brief(kind, 60)!r}; "
            f"expected a checkpoint of one of: {known_families()}."
        )
    if MASK_EMBEDDING in source.files:
        raise ArtifactError(
            f"{source} has an embedding of the mask token in {MASK_EMBEDDING}, which is not read "
            "here; look for a drafter without it."
        )
    files, places = _weights_files(source)
    single = files[0].name == WEIGHTS if files else False
    named = _of_drafter(_names(files[0]) if single else places)
    if not files or (single and named is None and not of_kangaroo(_names(files[0]))):
        return files, None
    tensors = _read_indexed(files, places) if places else read_tensors(files[0])
    _check_types(tensors, files[0])
    found = _family_of(config, tensors, files[0])
    if found is None and named is not None:
        raise ArtifactError(
            f"{files[0]} has a drafter's {brief(named, 80)}, and lacks tensors by which its family "
            "would be told, or has others of their names; download it again."
        )
    return files, found


def known_families() -> str:
    """The families whose drafters have weights."""
    return ", ".join(name for name in KNOWN if not family(name).weightless)


def format_of(config: dict[str, Any], names: Iterable[str]) -> str:
    """Whose format a drafter's checkpoint is in, by its config and names of tensors."""
    names = list(names)
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return "speculators"
    if any(name.startswith("blocks.") for name in names):
        return "vLLM"
    if config.get("eagle_config"):
        return "SpecForge"
    inside = ", inside of its target" if any(n.startswith(INSIDE) for n in names) else ""
    return f"its authors'{inside}"


def _not_run(config: dict[str, Any]) -> str:
    """What a config calls a drafter of a kind that no family runs; empty for any other."""
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS:
        return str(kind)
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return first if _BLOCKS.search(first) and first not in ARCHITECTURES else ""


def _weights_files(source: DrafterSource) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint that may hold a drafter, and which tensor is in which by an index.

    Of heads inside of a model, the index has theirs alone.
    """
    chosen, places = single_weights(source.files), dict[str, str]()
    if not chosen and INDEX in source.files:
        index = read_json(source.folder / INDEX).get("weight_map")
        index = index if isinstance(index, dict) else {}
        places = {name: file for name, file in index.items() if name.startswith(INSIDE)}
        if not places and _of_drafter(index) is not None:
            places = index
        for file in places.values():
            there = isinstance(file, str) and file in source.files and "/" not in file
            if not there or Path(file).suffix != ".safetensors":
                raise ArtifactError(
                    f"{source} has a {INDEX} that names {brief(repr(file), 80)}, which is not "
                    "there; download both again."
                )
        chosen = sorted(set(places.values()))
    if (pickles := pickled(chosen)) and not source.allow_pickle:
        raise ArtifactError(
            f"{source} holds its weights in {pickles[0]}, a pickle, which can run any code; ask "
            "for safetensors, or have its tensors alone read with allow_pickle=True "
            "(--allow-pickle)."
        )
    return [source.folder / file for file in chosen], places


def _names(file: Path) -> list[str]:
    """The names in a safetensors file's header."""
    with _named_if_damaged(file), safe_open(file, "pt") as found:
        return list(found.keys())


def _of_drafter(names: Iterable[str]) -> str | None:
    """The first name that only a drafter's tensors have."""
    known = (name for name in names if name.startswith(INSIDE) or _OF_DRAFTERS.fullmatch(name))
    return next(known, None)


def _read_indexed(files: list[Path], places: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of several files; one in two of them is that of the index, `places`.

    Raises:
        ArtifactError: a file is damaged, or lacks a tensor that the index places there.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = read_tensors(file)
        placed = {name for name, there in places.items() if there == file.name}
        if missing := sorted(placed - found.keys()):
            raise ArtifactError(
                f"{file.with_name(INDEX)} places {brief(missing[0], 80)} in {file.name}, which "
                "does not hold it; download both again."
            )
        tensors |= {n: t for n, t in found.items() if n in placed or n not in places}
    return tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU; of heads inside of a model theirs alone.

    Raises:
        ArtifactError: the file is damaged, or holds something else.
    """
    with _named_if_damaged(file):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as found:
                names = list(found.keys())
                heads = [name for name in names if name.startswith(INSIDE)]
                chosen = heads or names
                return {name: found.get_tensor(name) for name in chosen}
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(map(_is_plain, tensors.values())):
        raise ArtifactError(
            f"{file} holds a {type(tensors).__name__}, expected tensors by name, none of them "
            "sparse; export the state dict of the heads alone."
        )
    return tensors


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor whose values are all stored, one by one."""
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta


@contextmanager
def _named_if_damaged(file: Path) -> Iterator[None]:
    """While a file is read, an ArtifactError in the place of what is raised for a damaged one."""
    try:
        yield
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # torch raises many kinds for a damaged pickle
        what = "holds more than tensors, or is damaged, and is not read; ask for safetensors, or"
        if file.suffix == ".safetensors":
            what = f"is damaged or incomplete ({brief(error, 80)});"
        raise ArtifactError(f"{file} {what} download it again.") from error


def _check_types(tensors: dict[str, Tensor], file: Path) -> None:
    """Refuse matrices of whole numbers, or of floating point numbers of 8 bits."""
    for name, tensor in tensors.items():
        kind = tensor.dtype
        if tensor.dim() > 1 and not (kind.is_floating_point and kind.itemsize > 1):
            raise ArtifactError(
                f"{file} holds {brief(name, 80)} in {str(kind).removeprefix('torch.')}, as "
                "quantized weights are, which are not read; look for it in full precision."
            )


def _family_of(
    config: dict[str, Any], tensors: dict[str, Tensor], file: Path
) -> tuple[type[Drafter], dict[str, Any], dict[str, Tensor]] | None:
    """The family that knows these tensors, and what its `from_checkpoint` returns."""
    for name in KNOWN:
        try:
            found = family(name).from_checkpoint(config, tensors)
        except ArtifactError as error:
            raise ArtifactError(f"{file} is not read: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except MALFORMED as error:
            raise ArtifactError(
                f"{file} looks like one of {name}, and its tensors or its config do not fit "
                f"together ({brief(error)}); download both again."
            ) from error
        if found is not None:
            return family(name), *found
    return None
