"""Our kernels for CPUs, compiled once for a user by a C compiler, for what the processor has.

`cpu_kernels.c` is one source for all types and instruction sets. Each pair of them that is asked
for is compiled in about a second, into a file of its own: machines may share a home.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .machine import openmp_library

logger = logging.getLogger(__name__)


class InstructionSet(NamedTuple):
    """Instructions that kernels are compiled for.

    Attributes:
        test: the function of `torch.cpu` that says whether the processor and the system have them.
        flags: the compiler's, for just these.
        dtypes: whose kernels use what no later set of the list has.
    """

    name: str
    test: str
    flags: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_here(self) -> bool:
        """Whether this processor has them, on a system that the kernels are written for."""
        known = sys.platform == "linux" and platform.machine() == "x86_64"
        test = getattr(torch.cpu, self.test, None)
        return known and test is not None and bool(test())


TYPES = {torch.bfloat16: (), torch.float32: ("-DFLOAT32",)}
"""Types that there are kernels for, and the compiler's flags."""

_BOTH, _V4 = tuple(TYPES), "-march=x86-64-v4"
INSTRUCTION_SETS = (
    InstructionSet(
        "amx", "_is_amx_tile_supported", ("-march=sapphirerapids",), (torch.bfloat16,)
    ),
    InstructionSet(
        "avx512_bf16", "_is_avx512_bf16_supported", (_V4, "-mavx512bf16"), (torch.bfloat16,)
    ),
    InstructionSet("avx512", "_is_avx512_supported", (_V4,), _BOTH),
    InstructionSet("avx2", "_is_avx2_supported", ("-march=x86-64-v3",), _BOTH),
)  # fmt: skip
"""Best first."""

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC")
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class Attention(ctypes.Structure):
    """What a kernel of attention reads and writes, see `cpu_kernels.c`."""

    _fields_ = [
        *((name, _POINTER) for name in ("query", "key", "value", "mask", "out")),
        *((n, _LONG) for n in ("batch", "nodes", "heads", "group", "slots", "size", "value_size")),
        ("key_steps", _LONG * 3), ("value_steps", _LONG * 3), ("mask_steps", _LONG * 2),
        ("scale", _FLOAT),
    ]  # fmt: skip


class Choice(ctypes.Structure):
    """What a kernel that chooses tokens reads and writes, see `cpu_choices.h`."""

    _fields_ = [
        *((n, _POINTER) for n in ("scores", "seeds", "positions", "tokens", "out", "best")),
        *((n, _LONG) for n in ("batch", "rows", "size", "score_rows", "position_rows")),
        *((n, _LONG) for n in ("own_tokens", "stream", "threads")),
    ]  # fmt: skip


_ATTENTION = ctypes.POINTER(Attention)
_ARGUMENTS = {
    "products": [ctypes.c_char_p],
    "each_product": [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _INT],
    "norm": [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT],
    "rotate": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG],
    "attend": [_ATTENTION, _INT],
    "choose": [ctypes.POINTER(Choice)],
    "decoder_layers": [
        ctypes.c_char_p, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _ATTENTION,
        _POINTER, _LONG, _POINTER, _FLOAT, _INT,
    ],
    "move_path": [
        _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG,
    ],
}  # fmt: skip


class _Asked:
    """The name of the one set that is to be used; None for the best."""

    name: str | None = None


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Meanwhile kernels are those of one instruction set, in all threads; to compare them."""
    before, _Asked.name = _Asked.name, name
    try:
        yield
    finally:
        _Asked.name = before


def instruction_sets(dtype: torch.dtype) -> list[str]:
    """Names of the sets that this processor has kernels of a type for, best first."""
    return [each.name for each in INSTRUCTION_SETS if dtype in each.dtypes and each.is_here]


def kernels(dtype: torch.dtype) -> Any:
    """The compiled kernels of a type; None where they cannot be had, which is said once."""
    return _library(dtype, _Asked.name)


@functools.cache
def _library(dtype: torch.dtype, name: str | None) -> Any:
    failed = None
    for each in INSTRUCTION_SETS:
        if dtype not in each.dtypes or name not in (None, each.name) or not each.is_here:
            continue
        try:
            return _load(each, dtype)
        except OSError as error:
            failed = failed or str(error)
    if failed is not None:
        _say(failed)
    return None


@functools.cache
def _say(why: str) -> None:
    logger.warning("Layers are packed for oneDNN, which is slower than our kernels: %s", why)


def _load(chosen: InstructionSet, dtype: torch.dtype) -> Any:
    flags = (*_FLAGS, *chosen.flags, *TYPES[dtype])
    key = hashlib.sha256(repr((flags, _threads_of_torch())).encode())
    for part in (_SOURCE, *sorted(_SOURCE.parent.glob("cpu_*.h"))):
        key.update(part.read_bytes())
    type_name = str(dtype).removeprefix("torch.")
    file = cache_folder() / f"{chosen.name}-{type_name}-{key.hexdigest()[:16]}.so"
    if not file.exists():
        _compile(file, flags)
    library = ctypes.CDLL(str(file))
    if library.ask_for_tiles() != 0:
        raise OSError("the system does not grant the use of AMX")
    for function, arguments in _ARGUMENTS.items():
        found = getattr(library, function)
        found.argtypes, found.restype = arguments, None
    return library


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "headstart"


def _threads_of_torch() -> list[str]:
    """The library whose threads torch runs on: ours would wait in turns with those of another."""
    found = openmp_library()
    return ["-Wl,--as-needed", found] if found else []


def _compile(into: Path, flags: tuple[str, ...]) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise OSError("no C compiler was found")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        made = Path(folder) / into.name
        libraries = [*_threads_of_torch(), "-lm"]
        command = [*compiler.split(), *flags, str(_SOURCE), "-o", str(made), *libraries]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["the C compiler failed"])[-1])
        os.replace(made, into)  # whole, whoever else compiles it now
