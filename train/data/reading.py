"""Reads documents from files and folders: text, JSON Lines, JSON arrays, Parquet, the stdlib.

JSON is decoded by the standard library: `datasets`, which reads Parquet, would turn dates and mixed
columns into other values, and its errors name no line. Errors name file and line, or the number of
a row where lines are not known, and never quote a row, which may be private.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from .documents import CorpusError, Document, parse_row, text_key

# Tests repeat themselves, idlelib and lib2to3 carry test data, pydoc_data is one generated file of
# prose as large as a fifth of the default corpus; the rest is not the library's own.
_NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}
SUPPORTED = (
    '"stdlib", "target", or the path of a .txt, .jsonl or .json file (also .gz), of a .parquet '
    "file, or of a folder"
)


@dataclass
class Skipped:
    """What is left out of a corpus, and whether a row that cannot be read may be."""

    on_error: str = "raise"  # or "skip"
    files: list[str] = field(default_factory=list)  # names of what is not UTF-8 text
    rows: list[str] = field(default_factory=list)  # messages that name file and line


def read_documents(source: str | Path, answers: bool = False) -> list[Document]:
    """All documents of a file or a folder. Raises CorpusError.

    Without `answers` they are prompts: a chat ends with the user's last turn.
    """
    documents = read_source(str(source), Skipped())
    return list(documents) if answers else [document.prompts()[-1] for document in documents]


def read_source(source: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of a recipe's `corpus.source`, in the order of the hash of their ids.

    An id is the path of a file in the folder, or `file:number` of a line or row. Raises CorpusError
    where the source does not exist, or a file or row of it cannot be read.
    """
    path = Path(source).expanduser()
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        yield from _read_folder(library, "*.py", _NOT_LIBRARY, skipped)
    elif path.is_dir():
        yield from _read_folder(path, "*", {"__pycache__"}, skipped)
    elif path.is_file() and file_kind(path) in _READERS:
        yield from sorted(_read_file(path, path.name, skipped), key=lambda found: order(found.id))
    elif path.is_file():
        found = path.suffix or "nameless"
        raise CorpusError(f"{source}: found a {found} file; expected {SUPPORTED}")
    else:
        raise CorpusError(
            f"{source}: no such file or folder; expected {SUPPORTED} (a Hub data set is not read "
            "here: export it with datasets' to_parquet)"
        )


def file_kind(path: Path) -> str:
    """`.txt`, `.jsonl` or `.json`, gzipped or not; any other file's last suffix."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def order(name: str) -> bytes:
    """The sort key of a document's id: its sha256."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _read_folder(root: Path, names: str, without: set[str], skipped: Skipped) -> Iterator[Document]:
    """One document a file; files of rows hold one a row, and hidden files are left out."""
    files = {}
    for path in root.rglob(names):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and not without.intersection(parts) and path.is_file():
            files["/".join(parts)] = path
    for name in sorted(files, key=order):
        path, kind = files[name], file_kind(files[name])
        if kind in (".jsonl", ".parquet") or (kind == ".json" and _is_array_of_rows(path)):
            yield from _read_file(path, name, skipped)
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:  # binary, which may happen to decode
            skipped.files.append(name)
        elif text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _read_file(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of a file that `_READERS` can read; their ids begin with `name`."""
    kind = file_kind(path)
    for number, row in _READERS[kind](path):
        id = f"{name}:{number}"
        if kind == ".txt":
            yield Document(id, row)
            continue
        try:
            yield parse_row(_decode(row) if kind == ".jsonl" else row, id)
        except CorpusError as error:
            said = f"{path} {'line' if kind == '.jsonl' else 'row'} {number}: {error}"
            if skipped.on_error == "raise":
                raise CorpusError(f"{said} (corpus.on_error=skip leaves such rows out)") from None
            skipped.rows.append(said)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with fsspec.open(str(path), "rb", compression="infer") as lines:
            for number, raw in enumerate(lines, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise CorpusError(f"{path} line {number}: not UTF-8; convert the file") from None
    except (EOFError, OSError, zlib.error):
        raise CorpusError(f"{path} line {number + 1}: damaged gzip data; fetch it again") from None


def _decode(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # it holds the row: not to be chained
        message = f"not valid JSON ({error.msg}, column {error.colno}); fix or drop the line"
        raise CorpusError(message) from None
    except RecursionError:
        raise CorpusError("JSON nested too deep; fix or drop the line") from None


def _text(path: Path) -> str:
    lines = dict(_lines(path))
    return "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))


def _array(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        line, message = getattr(error, "lineno", 1), getattr(error, "msg", "nested too deep")
        raise CorpusError(f"{path} line {line}: not valid JSON ({message}); fix the file") from None
    if not isinstance(rows, list):
        raise CorpusError(f"{path} line 1: not a JSON array; expected [ and rows, or use .jsonl")
    return enumerate(rows, start=1)


def _is_array_of_rows(path: Path) -> bool:
    """Whether a .json file is an array whose first item is a row; other JSON is just text."""
    try:
        text = _text(path).lstrip()
        rows = text[1:].lstrip() if text.startswith("[") else "null"
        first, _ = json.JSONDecoder().raw_decode(rows)
    except (CorpusError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and text_key(first) is not None


def _table(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise CorpusError(f"{path}: reading it needs `pip install datasets`") from None
    rows = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return enumerate(rows, start=1)


_READERS = {".txt": _lines, ".jsonl": _lines, ".json": _array, ".parquet": _table}
