"""The corpus stage: text documents from the standard library, a file or a folder.

The result is `train.jsonl` and `held_out.jsonl`, one document a line. Documents are held out
whole, so that no held-out text has a twin half in the training set.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .recipe import Corpus
from .stages import write_atomically

Split = Literal["train", "held_out"]

# Tests repeat themselves, idlelib and lib2to3 carry test data, pydoc_data is one generated file of
# prose as large as a fifth of the default corpus; the rest is not the library's own.
_NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}
_KEYS = ("text", "prompt", "messages", "turns")
_SUPPORTED = '"stdlib", or the path of a .txt file, a .jsonl file or a folder of text files'


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and line."""


@dataclass(frozen=True)
class Document:
    """One text. `id` is where it came from; `messages` is set for chats and None for plain text.

    A chat's `text` is its contents joined by blank lines, for uses that know no chat template.
    """

    id: str
    text: str
    messages: list[dict[str, str]] | None = None


def build_corpus(spec: Corpus, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Write the documents of `spec.source` into `folder` and return the counts.

    Documents are taken in the order of the hash of their id (a relative path, or file:line) until
    the next would pass `spec.max_bytes`; of these, `round(spec.held_out * count)` are held out,
    drawn by a hash of seed and id (at least one, if `held_out` is not 0 and there are two). Files
    that are not UTF-8 text are skipped and counted. Raises CorpusError.
    """
    skipped: list[str] = []
    chosen: list[Document] = []
    size = 0
    for document in _read_source(spec.source, skipped):
        length = len(document.text.encode())
        if size + length > spec.max_bytes:
            if not chosen:
                raise CorpusError(
                    f"{document.id}: {length} bytes, more than corpus.max_bytes "
                    f"{spec.max_bytes}; raise corpus.max_bytes"
                )
            break
        chosen.append(document)
        size += length
    if not chosen:
        raise CorpusError(f"{spec.source}: no text found; expected {_SUPPORTED}")
    held_out = _hold_out(chosen, spec.held_out, seed)
    parts: dict[Split, list[Document]] = {
        "train": [document for document in chosen if document.id not in held_out],
        "held_out": [document for document in chosen if document.id in held_out],
    }
    counts: dict[str, Any] = {"skipped": len(skipped)}
    for split, documents in parts.items():
        lines = [json.dumps(asdict(document)) + "\n" for document in documents]
        write_atomically(folder / f"{split}.jsonl", "".join(lines).encode())
        counts[f"{split}_documents"] = len(documents)
        counts[f"{split}_bytes"] = sum(len(document.text.encode()) for document in documents)
    return counts


def load_documents(folder: Path, split: Split) -> list[Document]:
    """Read back what `build_corpus` wrote, in its order."""
    with open(folder / f"{split}.jsonl", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def read_documents(source: str | Path) -> list[Document]:
    """All documents of a .txt file (one a line), a .jsonl file or a folder. Raises CorpusError."""
    return list(_read_source(str(source), []))


def _read_source(source: str, skipped: list[str]) -> Iterator[Document]:
    """Documents in the order of their ids' hash."""
    path = Path(source).expanduser()
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        yield from _read_files(library, library.rglob("*.py"), _NOT_LIBRARY, skipped)
    elif path.is_dir():
        yield from _read_files(path, path.rglob("*"), {"__pycache__"}, skipped)
    elif path.is_file() and path.suffix in {".txt", ".jsonl"}:
        yield from sorted(_read_lines(path, path.name), key=lambda document: _order(document.id))
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
    root: Path, paths: Iterable[Path], excluded: set[str], skipped: list[str]
) -> Iterator[Document]:
    """One document a file; .jsonl files hold one a line, and hidden files are left out."""
    names = {}
    for path in paths:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and not excluded.intersection(parts) and path.is_file():
            names[path.relative_to(root).as_posix()] = path
    for name in sorted(names, key=_order):
        if names[name].suffix == ".jsonl":
            yield from _read_lines(names[name], name)
            continue
        try:
            text = names[name].read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(name)
            continue
        if "\0" in text:  # binary that happens to decode
            skipped.append(name)
        elif text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _read_lines(path: Path, name: str) -> Iterator[Document]:
    """One document for each line that is not blank."""
    with open(path, "rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{name}:{number}"
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise CorpusError(f"{path} line {number}: not UTF-8; convert the file") from error
            if not line.strip():
                continue
            if path.suffix == ".jsonl":
                yield _parse_row(line, where, f"{path} line {number}")
            else:
                yield Document(where, line)


def _parse_row(line: str, name: str, where: str) -> Document:
    """A JSONL row: `text` or `prompt` (a string), `messages` (a chat) or `turns` (strings).

    Of `turns` only the first is kept, as a user's message: the later ones answer replies that
    were never written.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: not valid JSON ({error.msg}); fix or drop the line") from error
    keys = [key for key in _KEYS if isinstance(row, dict) and key in row]
    if not keys:
        raise CorpusError(f"{where}: expected an object with one of the keys {', '.join(_KEYS)}")
    value = row[keys[0]]
    if keys[0] in ("text", "prompt") and _is_text(value):
        return Document(name, value)
    if keys[0] == "turns" and isinstance(value, list) and value and _is_text(value[0]):
        return Document(name, value[0], [{"role": "user", "content": value[0]}])
    if keys[0] == "messages" and isinstance(value, list) and value and all(map(_is_message, value)):
        messages = [{"role": m["role"], "content": m["content"]} for m in value]
        return Document(name, "\n\n".join(m["content"] for m in messages), messages)
    wanted = {
        "messages": "a list of objects with the strings role and content",
        "turns": "a list of strings",
    }.get(keys[0], "a string")
    raise CorpusError(f"{where}: {keys[0]} is not {wanted} (whole text, not empty)")


def _is_text(value: Any) -> bool:
    # A lone surrogate (JSON allows "\\ud800") has no UTF-8 form and no tokens.
    return isinstance(value, str) and bool(value.strip()) and not _has_surrogate(value)


def _is_message(value: Any) -> bool:
    content = value.get("content") if isinstance(value, dict) else None
    return isinstance(content, str) and not _has_surrogate(content) and _is_text(value.get("role"))


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _hold_out(documents: list[Document], share: float, seed: int) -> set[str]:
    if share == 0 or len(documents) < 2:
        return set()
    count = min(max(1, round(share * len(documents))), len(documents) - 1)
    return set(sorted((d.id for d in documents), key=lambda name: _order(f"{seed}:{name}"))[:count])


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
