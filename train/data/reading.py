"""Reads the documents of a source: files, folders, globs, the standard library, the Hub.

Errors name file and line, or the number of a row where lines are not known, and never quote a row,
which may be private.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..recipe import Source
from ..stages.folders import StageFolder, stage_folders
from .documents import CorpusError, Document
from .file_rows import READERS, file_kind, is_table, read_rows
from .hub import PRESETS, hub_rows, hub_source
from .parsing import parse_row

# Tests repeat themselves, idlelib and lib2to3 carry test data, pydoc_data is one generated file of
# prose as large as a fifth of the default corpus; the rest is not the library's own.
_NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}
SUPPORTED = (
    '"stdlib", "target", "hub:NAME", one of ' + ", ".join(PRESETS) + ", or the path or glob of "
    ".txt, .jsonl, .json, .csv or .tsv files (also .gz), of .parquet files, or of a folder"
)


@dataclass
class Skipped:
    """What is left out of a corpus, and whether a row that cannot be read may be."""

    on_error: str = "raise"  # or "skip"
    advice: str = " (corpus.on_error=skip leaves such rows out)"
    files: list[str] = field(default_factory=list)  # names of what is not UTF-8 text
    rows: int = 0
    ids_alone: bool = True  # whether a row may be its token ids, see `parse_row`
    first: str = ""  # of the rows: the message that names file and line
    counts: Counter[str] = field(default_factory=Counter)  # what `parse_row` left out of rows


def read_documents(source: str | Path, answers: bool = False) -> list[Document]:
    """All documents of a source, in the order of the hash of their ids. Raises CorpusError.

    Without `answers` they are prompts: a chat ends with the user's last turn.
    """
    skipped = Skipped(advice="", ids_alone=False)  # there is no such setting
    found = read_source(Source(source=str(source)), skipped)
    documents = sorted(found, key=lambda document: order(document.id))
    return documents if answers else [document.prompts()[-1] for document in documents]


def source_name(source: Source) -> str:
    """What a source is called in its documents: a file's or folder's name, a preset's, a Hub name.

    >>> source_name(Source(source="data/chats.jsonl")), source_name(Source(source="hub:ORG/SET"))
    ('chats.jsonl', 'ORG/SET')
    """
    if source.source.startswith("hub:"):
        return source.source.removeprefix("hub:")
    return Path(source.source).name or source.source


def read_source(
    source: Source,
    skipped: Skipped,
    name: str | None = None,
    wanted: Callable[[str], bool] = lambda id: True,
) -> Iterator[Document]:
    """The documents of one source, in any order.

    An id is the path of a file in the folder, or `file:number` of a line or row; with a `name` it
    begins with that. Raises CorpusError where the source does not exist, or a file or row of it
    cannot be read.

    Args:
        wanted: whether the document with this id is of use. It is asked in the order of the hash of
            the ids before a file of text is read; rows are always read, and so checked.
    """
    called = name or source_name(source)
    if (hub := hub_source(source)) is not None:
        rows = hub_rows(source)
        return _documents(called, f"hub:{hub.name}", "row", rows, called, source, skipped)
    files = source_files(source)
    path = Path(source.source).expanduser()
    if source.source != "stdlib" and path.is_file():
        return _documents(called, str(path), *read_rows(path), called, source, skipped)
    return _read_folder(files, f"{name}/" if name else "", called, source, skipped, wanted)


def source_files(source: Source) -> dict[str, Path]:
    """The files of a source by their path in it, which is the name of a single one.

    Raises CorpusError where there is no such file or folder.
    """
    text = source.source
    path = Path(text).expanduser()
    if text == "stdlib":
        return _files(Path(sysconfig.get_paths()["stdlib"]), "*.py", _NOT_LIBRARY)
    if path.is_dir():
        _check_is_no_run(path)
        return _files(path, "*", {"__pycache__"})
    if path.is_file() and file_kind(path) in READERS:
        return {path.name: path}
    if path.is_file():
        found = path.suffix or "nameless"
        raise CorpusError(f"{text}: found a {found} file; expected {SUPPORTED}")
    if glob.has_magic(text):
        matched = [Path(found) for found in glob.glob(str(path), recursive=True)]
        if files := [found for found in matched if found.is_file()]:
            root = os.path.commonpath([found.parent for found in files])
            return {found.relative_to(root).as_posix(): found for found in files}
        raise CorpusError(f"{text}: no file matches; expected {SUPPORTED}")
    raise CorpusError(f"{text}: no such file or folder; expected {SUPPORTED}")


def _check_is_no_run(folder: Path) -> None:
    """A run's folders hold its held-out documents too, and files that are no texts."""
    stage = StageFolder(folder)
    if not (stage.fingerprint or stage_folders(folder)):
        return
    run = folder.parent if stage.fingerprint else folder
    documents = run / "corpus" / "train.jsonl"
    expected = f"its training documents, {documents}" if documents.is_file() else SUPPORTED
    raise CorpusError(f"{folder}: found a folder of a run; expected {expected}")


def source_bytes(source: Source) -> int | None:
    """Bytes of a source's files; None where they are not known before it is read.

    Raises CorpusError where there is no such file or folder.
    """
    if source.source in ("stdlib", "target") or hub_source(source) is not None:
        return None
    return sum(path.stat().st_size for path in source_files(source).values())


def order(name: str) -> bytes:
    """The sort key of a document's id: its sha256."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _files(root: Path, names: str, without: set[str]) -> dict[str, Path]:
    """The files of a folder by their path in it, without hidden ones."""
    files = {}
    for folder, folders, found in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        for name in fnmatch.filter(found, names):
            path = Path(folder, name)
            if name[0] != "." and path.is_file():
                files[path.relative_to(root).as_posix()] = path
    return files


def _read_folder(
    files: dict[str, Path],
    prefix: str,
    called: str,
    source: Source,
    skipped: Skipped,
    wanted: Callable[[str], bool],
) -> Iterator[Document]:
    """One document a file; files of rows hold one a row."""
    names = {prefix + name: path for name, path in files.items()}
    for id in sorted(names, key=order):
        path = names[id]
        if is_table(path, source.columns):
            yield from _documents(id, str(path), *read_rows(path), called, source, skipped)
            continue
        if not wanted(id):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:  # binary, which may happen to decode
            skipped.files.append(id)
        elif text.strip():
            yield Document(id, text.replace("\r\n", "\n"), source=called)


def _documents(
    prefix: str,
    place: str,
    unit: str,
    rows: Iterator[tuple[int, Any]],
    called: str,
    source: Source,
    skipped: Skipped,
) -> Iterator[Document]:
    """The documents of rows; their ids are `prefix:number`, and errors name `place unit number`."""
    for number, row in rows:
        id = f"{prefix}:{number}"
        try:
            if isinstance(row, CorpusError):
                raise row
            columns, ids_alone = source.columns, skipped.ids_alone
            document = parse_row(row, id, called, columns, skipped.counts, ids_alone)
            category = row.get("category")
            yield replace(document, category=category) if isinstance(category, str) else document
        except CorpusError as error:
            said = f"{place} {unit} {number}: {error}"
            if skipped.on_error == "raise":
                raise CorpusError(f"{said}{skipped.advice}") from None
            skipped.rows += 1
            skipped.first = skipped.first or said
