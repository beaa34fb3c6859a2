"""Files that get their names once they are whole, and arrays of numbers in such files."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Self

import numpy as np

HEADER = 128
"""Bytes before the numbers of a `NumbersFile`."""


class WholeFile:
    """A file that gets its name once it is written to the end; after an error there is none.

    The disk need not hold it by then, see `flush_to_disk`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")  # on no other host too

    def __enter__(self) -> Self:
        self.file: IO[bytes] = open(self.temporary, "wb", buffering=1 << 18)
        return self

    def finish(self) -> None:
        """Write what is due at the end."""

    def __exit__(self, kind: type | None, *error: Any) -> None:
        try:
            with self.file:
                if kind is None:
                    self.finish()
            if kind is None:
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


class NumbersFile(WholeFile):
    """A .npy file of one dimension, whose length is known at its end."""

    def __init__(self, path: Path, kind: type[np.generic]):
        super().__init__(path)
        self.kind, self.count = np.dtype(kind), 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._write_header()
        return self

    def append(self, numbers: np.ndarray) -> None:
        self.file.write(numbers.astype(self.kind, copy=False).tobytes())
        self.count += len(numbers)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": self.kind.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)
        assert self.file.tell() == HEADER  # NumPy leaves room for the longest count
