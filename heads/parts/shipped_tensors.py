"""Tensors of a target's own files, by name, and those that are stored in FP8 in full precision.

FP8 files, as of DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Qwen, hold a matrix in E4M3 and, by
its name and `_scale_inv`, a scale for each block of R rows and C columns, `weight_block_size` of
their config; the last blocks may be smaller:

    W[i, j] = stored[i, j] * scale_inv[i // R, j // C]
"""

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

_SCALE = "_scale_inv"
_PLAIN = {"F64", "F32", "F16", "BF16", "I64"}
"""What safetensors calls the types of tensors that are not quantized."""


def find_tensors(target: PreTrainedModel, pattern: str) -> dict[str, Path]:
    """The tensors of a target's files whose names a regular expression finds, by file.

    Raises:
        OSError: a file is missing.
    """
    index = _file(target, SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        files = json.loads(index.read_bytes())["weight_map"]
    elif (single := _file(target, SAFE_WEIGHTS_NAME)) is not None:
        with safe_open(single, "pt") as file:
            files = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    else:
        return {}
    chosen = {name: file for name, file in files.items() if re.search(pattern, name)}
    found = {file: _file(target, file) for file in set(chosen.values())}
    if missing := [file for file, path in found.items() if path is None]:
        raise OSError(f"{missing[0]} is missing")
    return {name: found[file] for name, file in chosen.items()}  # type: ignore[misc]


def _file(target: PreTrainedModel, name: str) -> Path | None:
    find: Any = partial(cached_file, revision=getattr(target.config, "_commit_hash", None))
    found = find(target.name_or_path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def quantized(named: dict[str, Path]) -> bool:
    """Whether some tensors are, of those that `find_tensors` found."""
    for path, names in _by_file(named):
        with safe_open(path, "pt") as file:
            if any(file.get_slice(name).get_dtype() not in _PLAIN for name in names):
                return True
    return False


def _by_file(named: dict[str, Path]) -> list[tuple[Path, list[str]]]:
    paths = sorted(set(named.values()))
    return [(path, [name for name, held in named.items() if held == path]) for path in paths]


def read_tensors(target: PreTrainedModel, named: dict[str, Path]) -> dict[str, Tensor]:
    """Those that `find_tensors` found, on the CPU; of FP8 in the target's dtype, without scales.

    Raises:
        ValueError: one is quantized in another way, or its scales do not fit it.
    """
    tensors: dict[str, Tensor] = {}
    for path, names in _by_file(named):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    config: dict[str, Any] = {}
    if (path := _file(target, CONFIG_NAME)) is not None:
        config = json.loads(path.read_bytes()).get("quantization_config") or {}
    stored = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    for name in [name for name in stored if name + _SCALE in tensors]:
        scales, blocks = tensors.pop(name + _SCALE), config.get("weight_block_size")
        try:
            tensors[name] = in_full(tensors[name], scales, blocks).to(target.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.element_size() == 1 or tensor.dtype == torch.int32:
            method = config.get("quant_method") or "a way that is not known here"
            raise ValueError(
                f"{name} is quantized by {method}; of such modules those in FP8 with "
                f"weight{_SCALE} can be read"
            )
    return tensors


def in_full(stored: Tensor, scales: Tensor, blocks: Sequence[int] | None) -> Tensor:
    """A matrix that is stored in FP8, in float32; any dimensions before its two are of several.

    Args:
        stored: [..., N, K]; scales: [..., ceil(N / R), ceil(K / C)].
        blocks: (R, C); None for one scale of the whole matrix.

    Raises:
        ValueError: the scales are of another shape, or no floating point numbers.

    >>> stored = torch.tensor([[1.0, 2.0, 4.0]] * 2).to(torch.float8_e4m3fn)
    >>> in_full(stored, torch.tensor([[0.5, 3.0]]), (2, 2)).tolist()
    [[0.5, 1.0, 12.0], [0.5, 1.0, 12.0]]
    """
    *before, rows, columns = stored.shape
    height, width = blocks or (rows, columns)
    expected = [*before, math.ceil(rows / height), math.ceil(columns / width)]
    if blocks is None and scales.numel() == math.prod(before):
        scales = scales.reshape(expected)
    if list(scales.shape) != expected or not scales.is_floating_point():
        raise ValueError(
            f"its scales are {scales.dtype} of shape {list(scales.shape)}; expected floating point "
            f"numbers of shape {expected}, for blocks of {height} x {width}"
        )
    scales = scales.float().repeat_interleave(height, -2)[..., :rows, :]
    return stored.float() * scales.repeat_interleave(width, -1)[..., :columns]
