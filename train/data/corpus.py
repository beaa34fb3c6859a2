"""The corpus stage: documents from the standard library, a file, a folder, or the target itself.

The result is `train.jsonl` and `held_out.jsonl`, one document a line. Documents are held out
whole, so that no held-out text has a twin half in the training set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..recipe import Corpus
from .documents import CorpusError, Document, file_kind, is_array_of_rows, read_file

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]

# Tests repeat themselves, idlelib and lib2to3 carry test data, pydoc_data is one generated file of
# prose as large as a fifth of the default corpus; the rest is not the library's own.
_NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}
_SUPPORTED = (
    '"stdlib", "target", or the path of a .txt, .jsonl or .json file (also .gz) or of a folder'
)


@dataclass
class Skipped:
    """What is left out of a corpus, and whether a bad row may be.

    `files` are not UTF-8 text (names), `rows` cannot be read (messages that name file and line).
    """

    on_error: str = "raise"
    files: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)

    def row(self, error: CorpusError) -> None:
        """Note a bad row, or raise the error where the policy is to raise."""
        if self.on_error == "raise":
            raise CorpusError(f"{error} (corpus.on_error=skip leaves such rows out)") from None
        self.rows.append(str(error))


def build_corpus(spec: Corpus, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Write the documents of `spec.source` into `folder` and return the counts.

    Documents are taken in the order of the hash of their id (a relative path, or file:line) until
    the next would pass `spec.max_bytes`; of these, `round(spec.held_out * count)` are held out,
    drawn by a hash of seed and id (at least one, if `held_out` is not 0 and there are two). Files
    that are not UTF-8 text are skipped and counted, rows that cannot be read only where
    `spec.on_error` is `skip`. Raises CorpusError.
    """
    skipped = Skipped(spec.on_error)
    chosen: list[Document] = []
    size = 0
    for document in _read_spec(spec, seed, skipped):
        length = len(document.whole().encode())
        if size + length > spec.max_bytes:
            if not chosen:
                raise CorpusError(
                    f"{document.id}: {length} bytes, more than corpus.max_bytes "
                    f"{spec.max_bytes}; raise corpus.max_bytes"
                )
            break
        chosen.append(document)
        size += length
    if skipped.rows:
        logger.warning("corpus: %d rows skipped; the first: %s", len(skipped.rows), skipped.rows[0])
    if not chosen:
        first = f"; {len(skipped.rows)} rows skipped, {skipped.rows[0]}" if skipped.rows else ""
        raise CorpusError(f"{spec.source}: no text found{first}; expected {_SUPPORTED}")
    held_out = _hold_out(chosen, spec.held_out, seed)
    parts: dict[Split, list[Document]] = {
        "train": [document for document in chosen if document.id not in held_out],
        "held_out": [document for document in chosen if document.id in held_out],
    }
    from headstart.heads.core.files import write_atomically  # imports torch; reading needs none

    counts: dict[str, Any] = {"skipped": len(skipped.files), "skipped_rows": len(skipped.rows)}
    for split, documents in parts.items():
        lines = [json.dumps(asdict(document)) + "\n" for document in documents]
        write_atomically(folder / f"{split}.jsonl", "".join(lines).encode())
        counts[f"{split}_documents"] = len(documents)
        counts[f"{split}_bytes"] = sum(len(document.whole().encode()) for document in documents)
    return counts


def load_documents(folder: Path, split: Split) -> list[Document]:
    """Read back what `build_corpus` wrote, in its order."""
    with open(folder / f"{split}.jsonl", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def read_documents(source: str | Path, answers: bool = False) -> list[Document]:
    """All documents of a file or a folder, as prompts. Raises CorpusError.

    answers: keep the answers that came with them; else a chat ends with the user's last turn.
    """
    documents = _read_source(str(source), Skipped())
    return list(documents) if answers else [document.prompts()[-1] for document in documents]


def _read_spec(spec: Corpus, seed: int, skipped: Skipped) -> Iterator[Document]:
    if spec.source != "target":
        yield from _read_source(spec.source, skipped)
        return
    from .sampled_corpus import write_openings  # loads torch

    assert spec.writer is not None  # the recipe filled it in
    yield from write_openings(spec.writer, spec.opening_tokens, seed)


def _read_source(source: str, skipped: Skipped) -> Iterator[Document]:
    """Documents in the order of their ids' hash."""
    path = Path(source).expanduser()
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        yield from _read_files(library, library.rglob("*.py"), _NOT_LIBRARY, skipped)
    elif path.is_dir():
        yield from _read_files(path, path.rglob("*"), {"__pycache__"}, skipped)
    elif path.is_file() and file_kind(path) in {".txt", ".jsonl", ".json"}:
        rows = read_file(path, path.name, skipped.row)
        yield from sorted(rows, key=lambda document: _order(document.id))
    elif path.is_file():
        raise CorpusError(
            f"{source}: found a {path.suffix or 'nameless'} file; expected {_SUPPORTED}"
        )
    else:
        raise CorpusError(
            f"{source}: no such file or folder; expected {_SUPPORTED} (a Hub data set is not read "
            "here: export it with datasets' to_json)"
        )


def _read_files(
    root: Path, paths: Iterable[Path], excluded: set[str], skipped: Skipped
) -> Iterator[Document]:
    """One document a file; files of rows hold one a row, and hidden files are left out."""
    names = {}
    for path in paths:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and not excluded.intersection(parts) and path.is_file():
            names[path.relative_to(root).as_posix()] = path
    for name in sorted(names, key=_order):
        path, kind = names[name], file_kind(names[name])
        if kind == ".jsonl" or (kind == ".json" and is_array_of_rows(path)):
            yield from read_file(path, name, skipped.row)
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.files.append(name)
            continue
        if "\0" in text:  # binary that happens to decode
            skipped.files.append(name)
        elif text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _hold_out(documents: list[Document], share: float, seed: int) -> set[str]:
    if share == 0 or len(documents) < 2:
        return set()
    count = min(max(1, round(share * len(documents))), len(documents) - 1)
    return set(sorted((d.id for d in documents), key=lambda name: _order(f"{seed}:{name}"))[:count])


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
