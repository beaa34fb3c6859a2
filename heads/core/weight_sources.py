"""Where accelerate keeps weights that it streams in: tensors in CPU memory, or bytes in files.

A file is read as bytes, at the places that its header gives. accelerate opens it anew for each
weight and maps it, so that a file which was cut short meanwhile would end the process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn

from .errors import MALFORMED, DecodingError, brief

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
"""As headers of safetensors name them."""


class Source(Protocol):
    """Where a weight comes from.

    Attributes:
        like: a tensor of the weight's shape and type.
        attached: whether accelerate still takes it from there.
        place: the file and the byte; weights are read in that order, as disks are fastest.
    """

    @property
    def place(self) -> tuple[str, int]: ...

    @property
    def like(self) -> Tensor: ...

    @property
    def attached(self) -> bool: ...

    def read(self, to: Tensor, files: OpenFiles) -> None:
        """Write the weight to a tensor on the CPU."""
        ...


class OpenFiles(ExitStack):
    """Files that weights are read from, each opened once, and closed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, FileIO] = {}

    def find(self, path: Path, stamp: tuple[int, ...]) -> FileIO:
        """A file, open; OSError where it is not the one that was there, see `_stamp`."""
        if path not in self._open:
            file = self.enter_context(FileIO(path))
            self._open[path] = file
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise OSError("it was changed")
            if hasattr(os, "posix_fadvise"):  # the system then reads far larger pieces at once
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[path]


class InMemory:
    """A weight in CPU memory, under a key of the dictionary that accelerate's hook looks in."""

    def __init__(self, kept: Any, key: str):
        self._kept, self._key, self._own = kept, key, kept[key]

    @property
    def place(self) -> tuple[str, int]:
        """None."""
        return "", 0

    @property
    def like(self) -> Tensor:
        """The weight itself."""
        return self._own

    @property
    def attached(self) -> bool:
        """Whether accelerate still has that very tensor."""
        return self._kept.get(self._key) is self._own

    def read(self, to: Tensor, files: OpenFiles) -> None:
        """Copy the weight."""
        to.copy_(self._own.detach())  # in a thread of its own gradients are on

    def move(self, to: Tensor) -> None:
        """Copy the weight, and let accelerate find the copy in its place."""
        self.read(to, OpenFiles())
        self._kept[self._key] = self._own = to


@dataclass(frozen=True)
class InFile:
    """A weight whose bytes are in a file.

    Attributes:
        index: accelerate's, by key: its hook reads what that says.
        info: what it said when this was found.
        first: the byte of the file that the weight begins at; dtype: of the numbers there.
        like: the weight as its module has it, of the same shape.
        stamp: of the file when this was found, see `_stamp`.
    """

    index: Mapping[str, Any]
    key: str
    info: Any
    path: Path
    first: int
    dtype: torch.dtype
    like: Tensor
    stamp: tuple[int, ...]

    @property
    def place(self) -> tuple[str, int]:
        """Where it begins."""
        return str(self.path), self.first

    @property
    def attached(self) -> bool:
        """Whether accelerate would still read it there."""
        return self.index.get(self.key) is self.info

    def read(self, to: Tensor, files: OpenFiles) -> None:
        """Read the weight, in its module's type.

        Raises:
            DecodingError: the file is gone, or is not what it was.
        """
        own = to if to.dtype == self.dtype else torch.empty(to.shape, dtype=self.dtype)
        memory: Any = own.reshape(-1).view(torch.uint8).numpy()
        try:
            file = files.find(self.path, self.stamp)
            file.seek(self.first)
            done = 0
            while done < len(memory):  # one call reads 2 GB at most
                count = file.readinto(memory[done:])
                if not count:
                    raise OSError("it ended early")
                done += count
        except OSError as error:
            raise DecodingError(
                f"{self.path}, where weights of the target are, cannot be read ({brief(error)}); "
                "put back the file that was there when the target was loaded, or load it again."
            ) from error
        if own is not to:
            to.copy_(own)


def sources_of(module: nn.Module) -> dict[str, Source] | None:
    """Where accelerate's hook of a module gets each of its own weights, by name.

    None where any of them comes from elsewhere, is not a plain tensor, or is shared with others.
    """
    assert has_offloaded_params(module)
    hook: Any = module._hf_hook
    kept, prefix = hook.weights_map, ""
    if hook.tied_params_names or hook.offload_buffers:
        return None
    if hasattr(kept, "prefix"):
        kept, prefix = kept.dataset, kept.prefix
    found = {}
    for name, weight in module.named_parameters(recurse=False):
        source = _source(kept, f"{prefix}{name}", weight)
        if source is None:
            return None
        found[name] = source
    return found


def _source(kept: Any, key: str, weight: nn.Parameter) -> Source | None:
    in_memory: Any = getattr(kept, "state_dict", kept)
    if isinstance(in_memory, Mapping) and key in in_memory:
        plain = type(in_memory[key]) in (Tensor, nn.Parameter)
        return InMemory(in_memory, key) if plain else None
    index: Any = getattr(kept, "index", {})
    if key not in index or type(weight) is not nn.Parameter:
        return None
    try:
        return _in_file(index, key, getattr(kept, "save_folder", None), weight)
    except (OSError, *MALFORMED):  # accelerate will say what is wrong, if it is
        return None


def _in_file(index: Any, key: str, folder: Any, weight: Tensor) -> InFile | None:
    info = index[key]
    if (name := info.get("safetensors_file")) is not None:
        path = Path(name)
        stamp = _stamp(path.stat())
        begin, header = _header(path, stamp)
        entry = header[info.get("weight_name", key)]
        dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
        first, end = (begin + offset for offset in entry["data_offsets"])
    else:  # a file of its own, as accelerate writes it
        path = Path(folder) / f"{key}.dat"
        stamp = _stamp(path.stat())
        dtype, shape = getattr(torch, info["dtype"]), info["shape"]
        first, end = 0, path.stat().st_size
    size = weight.numel() * dtype.itemsize
    if tuple(shape) != tuple(weight.shape) or end - first != size or not size:
        return None
    like = torch.empty_like(weight, device="meta")
    return InFile(index, key, info, path, first, dtype, like, stamp)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """What tells a file from one that was written since."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _header(path: Path, stamp: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
    """Where the numbers of a safetensors file begin, and what its header says of each tensor."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > stamp[1]:
            raise ValueError("it is no safetensors file")
        return 8 + size, json.loads(file.read(size))
