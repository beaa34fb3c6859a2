"""The rows of files: text, JSON Lines, JSON arrays, CSV, Parquet; one at a time, none is held.

JSON is decoded by the standard library: `datasets`, which reads Parquet, would turn dates and mixed
columns into other values, and its errors name no line. For the same reason the standard library
reads CSV, whose values all are strings. A row that cannot be read is given as the CorpusError that
says so, without the place, and the rows behind it still follow.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from .documents import CorpusError
from .parsing import text_key

Rows = Iterator[tuple[int, Any]]
"""The number of a line or row, from 1, and what it holds."""

_CHUNK = 1 << 20  # bytes of a JSON array that are read at once
_SPACE = re.compile(r"[ \t\n\r]*")


def file_kind(path: Path) -> str:
    """The last suffix of a file's name, of a gzipped file the one before."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_rows(path: Path) -> tuple[str, Rows]:
    """What a file's rows are called (line or row), and the rows. Raises CorpusError.

    A row is a value as JSON has it; a line of a text file is one with the key `text`.
    """
    return READERS[file_kind(path)](path)


def is_table(path: Path, columns: dict[str, str] | None) -> bool:
    """Whether a file in a folder holds rows; JSON and CSV without a known column are just text."""
    kind = file_kind(path)
    if kind not in (".json", ".csv", ".tsv"):
        return kind in (".jsonl", ".parquet")
    try:
        _, first = next(json_array(path) if kind == ".json" else _csv_records(path))
    except (CorpusError, StopIteration):
        return False
    names = first if kind != ".json" else list(first) if isinstance(first, dict) else []
    known = text_key(dict.fromkeys(names, "")) is not None
    return known or bool(set(names) & set((columns or {}).values()))


def text_lines(path: Path) -> Rows:
    """The lines that are not blank."""
    number = 0
    try:
        with _open(path) as lines:
            for number, raw in enumerate(lines, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line and not line.isspace():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise CorpusError(f"{path} line {number}: not UTF-8; convert the file") from None
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, number + 1, error) from None


def json_lines(path: Path) -> Rows:
    """The values of JSON Lines."""
    for number, line in text_lines(path):
        row: Any
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:  # it holds the row: not to be chained
            said = f"not valid JSON ({error.msg}, column {error.colno}); fix or drop the line"
            row = CorpusError(said)
        except RecursionError:
            row = CorpusError("JSON nested too deep; fix or drop the line")
        yield number, row


def json_rows(path: Path) -> Rows:
    """The rows of what calls itself JSON: an array, or as often JSON Lines."""
    with _open(path) as stream:
        lines = _Text(path, stream).next_character() != "["
    return json_lines(path) if lines else json_array(path)


def json_array(path: Path) -> Rows:
    """The items of a file that holds one JSON array."""
    with _open(path) as stream:
        text = _Text(path, stream)
        if text.next_character() != "[":
            raise CorpusError(
                f"{path} line 1: not a JSON array; expected [ and rows, or use .jsonl"
            )
        text.position += 1
        if text.next_character() != "]":
            for number in itertools.count(1):
                text.next_character()
                yield number, text.value()
                if (after := text.next_character()) == "]":
                    break
                if after != ",":
                    raise text.error("Expecting ',' delimiter")
                text.position += 1
        text.position += 1
        if text.next_character():
            raise text.error("Extra data")


class _Text:
    """The text of a stream from `position` on, as much of it as was needed so far."""

    def __init__(self, path: Path, stream: BinaryIO):
        self.path, self.stream = path, stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position, self.line, self.ended = "", 0, 1, False
        self.last = 1  # line of the last character before `text` that is no white space
        self.decode: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode

    def next_character(self) -> str:
        """What stands behind white space; nothing at the end."""
        while True:
            self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.text):
                return self.text[self.position]
            if self.ended:
                return ""
            self.more()

    def value(self) -> Any:
        """The JSON value at the position, which moves behind it."""
        while True:
            try:
                value, end = self.decode(self.text, self.position)
            except json.JSONDecodeError as error:
                # A value that is cut off by the end of what was read breaks off there.
                near = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated")
                if self.ended or not near:
                    raise self.error(error.msg, error.pos) from None
            except RecursionError:
                raise self.error("nested too deep") from None
            else:
                if end < len(self.text) or self.ended:  # else a number might go on
                    self.position = end
                    return value
            self.more()

    def more(self) -> None:
        """Read as much again as there is, so that a long value is not looked at too often."""
        if done := self.text[: self.position].rstrip():
            self.last = self.line + done.count("\n")
        self.line += self.text.count("\n", 0, self.position)
        rest, self.position = self.text[self.position :], 0
        lines = self.line + rest.count("\n")
        try:
            data = self.stream.read(max(_CHUNK, len(rest)))
            self.ended = not data
            self.text = rest + self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            lines += error.object.count(b"\n", 0, error.start)
            raise CorpusError(f"{self.path} line {lines}: not UTF-8; convert the file") from None
        except (EOFError, OSError, zlib.error) as error:
            raise _damaged(self.path, lines, error) from None

    def error(self, said: str, position: int | None = None) -> CorpusError:
        """`said` with the line of the position; at the end of a file, of its last text."""
        at = self.position if position is None else position
        if at < len(self.text):
            line = self.line + self.text.count("\n", 0, at)
        else:
            rest = self.text.rstrip()
            line = self.line + rest.count("\n") if rest else self.last
        return CorpusError(f"{self.path} line {line}: not valid JSON ({said}); fix the file")


def csv_rows(path: Path) -> Rows:
    """The rows of a table as dicts of strings, under the names in the first line.

    The number is that of the line at which a row begins.
    """
    names: list[str] | None = None
    for number, row in _csv_records(path):
        if names is None:
            names = row
        elif len(row) == len(names):
            yield number, dict(zip(names, row, strict=True))
        elif row:
            said = f"found {len(row)} fields, expected the {len(names)} of the first line"
            yield number, CorpusError(said)


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit((1 << 31) - 1)  # of the process; the usual one is 128 KB
    line = 0
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as text:
            separator = "\t" if file_kind(path) == ".tsv" else ","
            records = csv.reader(text, delimiter=separator, strict=True)
            for record in records:
                yield line + 1, record
                line = records.line_num
    except UnicodeDecodeError:
        raise CorpusError(f"{path} line {line + 1}: not UTF-8; convert the file") from None
    except csv.Error as error:
        said = f"{path} line {line + 1}: not valid CSV ({error}); fix the file"
        raise CorpusError(said) from None
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, line + 1, error) from None


def parquet_rows(path: Path) -> Rows:
    """The rows of a Parquet file."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise CorpusError(f"{path}: reading it needs `pip install datasets`") from None
    number = 0
    try:
        rows = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield number, row
    except (OSError, ValueError) as error:  # pyarrow's own are both; they may quote values
        kind = type(error).__name__
        said = f"{path} row {number + 1}: not Parquet that can be read ({kind}); write it again"
        raise CorpusError(said) from None


def _open(path: Path) -> BinaryIO:
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    return cast(BinaryIO, opened)


def _damaged(path: Path, line: int, error: Exception) -> CorpusError:
    if path.suffix == ".gz":
        return CorpusError(f"{path} line {line}: damaged gzip data; fetch it again")
    said = getattr(error, "strerror", None) or type(error).__name__
    return CorpusError(f"{path} line {line}: cannot be read ({said})")


READERS: dict[str, Callable[[Path], tuple[str, Rows]]] = {
    ".txt": lambda path: ("line", ((n, {"text": line}) for n, line in text_lines(path))),
    ".jsonl": lambda path: ("line", json_lines(path)),
    ".json": lambda path: ("row", json_array(path)),
    ".csv": lambda path: ("line", csv_rows(path)),
    ".tsv": lambda path: ("line", csv_rows(path)),
    ".parquet": lambda path: ("row", parquet_rows(path)),
}
