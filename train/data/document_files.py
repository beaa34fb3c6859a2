"""Documents on disk: JSON Lines that are read by an index of offsets, one document at a time."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from headstart.heads.core.files import flush_to_disk

from .documents import Document, plain_chat

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def document_line(document: Document) -> tuple[bytes, bytes]:
    """A document as a line of JSON, in two parts whose sum is the line.

    The first has id, source and opening, the second the content, which is equal for equal
    documents. The text of a chat is left out: `plain_chat` makes it.
    """
    content: dict[str, Any] = {}
    if document.messages is None:
        content["text"] = document.text
        if document.answer is not None:
            content["answer"] = document.answer
    else:
        content["messages"] = document.messages
        if document.tools is not None:
            content["tools"] = document.tools
    if document.ids is not None:
        content["ids"] = document.ids
    # A file's name may hold bytes that are no UTF-8, as half surrogates: in JSON they are escaped.
    known = {"id": document.id, "source": document.source}
    known |= {"opening": document.opening} if document.opening else {}
    head = json.dumps(known)
    return f"{head[:-1]}, ".encode(), f"{_encode(content)[1:]}\n".encode()


class Documents(Sequence[Document]):
    """The documents of a file that `write_documents` wrote, or of any in the same form.

    Only the offsets of the lines are held in memory, or mapped; a line is read when it is asked
    for. Objects can be sent to other processes, which open the file themselves.
    """

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self.offsets = _offsets(path, size)  # [n + 1] int64, of the lines' starts and the end

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        row = json.loads(self._data[self.offsets[place] : self.offsets[place + 1]])
        if "text" not in row:
            row["text"] = plain_chat(row["messages"])
        return Document(**row)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def __reduce__(self) -> tuple[type[Documents], tuple[Path]]:
        return Documents, (self.path,)


def write_documents(path: Path, lines: Iterable[bytes | memoryview]) -> int:
    """Write lines, one after the other, and the index beside them; returns their number.

    The index, `NAME.offsets.npy`, is written first, and what a killed process leaves has another
    name than `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    ends = [0]
    try:
        with open(temporary, "wb", buffering=1 << 20) as file:
            for line in lines:
                ends.append(ends[-1] + file.write(line))
        flush_to_disk(temporary)
        np.save(_index(path), np.array(ends, np.int64))
        flush_to_disk(_index(path))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)
    return len(ends) - 1


def is_indexed(path: Path) -> bool:
    """Whether `write_documents` wrote a file: its index stands beside it."""
    return path.is_file() and _index(path).is_file()


def _index(path: Path) -> Path:
    return path.with_name(f"{path.stem}.offsets.npy")


def _offsets(path: Path, size: int) -> np.ndarray:
    """The saved index where it fits the file; else one made by reading the file through."""
    if _index(path).exists():
        offsets = np.load(_index(path), mmap_mode="r")
        if offsets[-1] == size:
            return offsets
    with open(path, "rb") as lines:
        ends = np.cumsum([0, *map(len, lines)], dtype=np.int64)
    return ends
