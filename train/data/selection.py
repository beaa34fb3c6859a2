"""Which documents a corpus consists of, and which of them are held out.

Documents are written to a spool file as they are read, and a record of 64 bytes each is kept: what
is chosen depends on the documents alone, not on the order in which they came.
"""

from __future__ import annotations

import mmap
import os
import struct
import unicodedata
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from .document_files import document_line
from .documents import Document

RECORD = np.dtype([
    ("key", "<u8"),  # the order of the documents
    ("content", "<u8", 2),  # a hash: equal for equal documents
    ("prompt", "<u8"),  # a hash of seed and first prompt, spaces and capitals aside
    ("start", "<u8"), ("length", "<u8"),  # of the line in the spool
    ("size", "<u8"),  # bytes of the document's text
    ("source", "<u8"),
])  # fmt: skip
_PACK = struct.Struct("<QQQQQQQQ").pack
_END = (1 << 64) - 1


class Spool:
    """Documents on their way from their sources into the corpus.

    Args:
        path: a file that is written meanwhile, and removed by `close`.
        budgets: bytes of text that are taken of each source, at most.
        dedup: keep one of documents with the same content, whatever their source.
        seed: decides the draw of the held-out documents.
    """

    def __init__(self, path: Path, budgets: list[float], dedup: bool, seed: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.budgets, self.dedup = path, budgets, dedup
        self.salt = seed.to_bytes(16, "little")
        self.file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self.bytes_written = 0
        self.packed = bytearray()
        self.bounds = [_END] * len(budgets)  # of a source: keys from here on are of no use
        self.due = list(budgets)  # bytes of a source until its bound is looked for again

    def wants(self, source: int, key: int) -> bool:
        """Whether a document could still be chosen: more than the budget does not stand before."""
        return key < self.bounds[source]

    def add(self, document: Document, source: int, key: int) -> None:
        """Keep a document, if it could be chosen."""
        if not self.wants(source, key):
            return
        head, content = document_line(document)
        prompt = document.first_prompt()
        if not prompt.isascii():
            prompt = unicodedata.normalize("NFC", prompt)
        prompt = " ".join(prompt.casefold().split())
        (group,) = struct.unpack(
            "<Q", blake2b(prompt.encode(), digest_size=8, key=self.salt).digest()
        )
        digest = struct.unpack("<QQ", blake2b(content, digest_size=16).digest())
        size, length = document.size, len(head) + len(content)
        self.packed += _PACK(key, *digest, group, self.bytes_written, length, size, source)
        self.file.write(head)
        self.file.write(content)
        self.bytes_written += length
        self.due[source] -= size
        if self.due[source] < 0:
            self.end_of(source)

    def records(self) -> np.ndarray:
        """What is known of the documents that could be chosen, in their order.

        Of equal ones it has that of the first source, and there the first.
        """
        records = np.array(np.frombuffer(self.packed, RECORD))
        bounds = np.array(self.bounds, "<u8")
        records = records[records["key"] < bounds[records["source"]]]
        records = records[np.argsort(records["key"], kind="stable")]
        if not self.dedup or not len(records):
            return records
        content = records["content"]
        by_content = np.lexsort((records["source"], content[:, 0], content[:, 1]))  # stable
        sorted_content = content[by_content]
        first = np.ones(len(records), bool)
        first[by_content[1:]] = (sorted_content[1:] != sorted_content[:-1]).any(1)
        return records[first]

    def duplicates(self) -> int:
        """How many documents `records` leaves out since they are equal to another."""
        records = np.frombuffer(self.packed, RECORD)
        bounds = np.array(self.bounds, "<u8")
        count = int((records["key"] < bounds[records["source"]]).sum())
        del records  # or nothing could be added any more
        return count - len(self.records())

    def end_of(self, source: int) -> None:
        """Forget what cannot be chosen; called when all documents of a source were added."""
        records = self.records()
        mine = records[records["source"] == source]
        over = np.cumsum(mine["size"]) > self.budgets[source]
        if over.any():
            self.bounds[source] = int(mine["key"][over.argmax()])
        self.due[source] = self.budgets[source]

    def ended(self, source: int) -> bool:
        """Whether a source has more than its budget; known when all its documents were added."""
        return self.bounds[source] < _END

    def lines(self, chosen: np.ndarray) -> Iterator[memoryview]:
        """The lines of records, in their order."""
        self.file.flush()
        if not len(chosen):
            return
        with open(self.path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(data)
        starts = chosen["start"].tolist()
        for start, length in zip(starts, chosen["length"].tolist(), strict=True):
            yield view[start : start + length]

    def close(self) -> None:
        """Remove the file."""
        self.file.close()
        os.unlink(self.path)


def choose(records: np.ndarray, weights: list[float], max_bytes: int) -> np.ndarray:
    """Which records make the corpus.  # [n] bool

    Of each source the first ones, until the next would pass its share of the bytes: `max_bytes`
    divided by the weights, or less, so that the shares hold, where a source has too little.
    """
    chosen = np.zeros(len(records), bool)
    total = float(max_bytes)
    shares = [weight / sum(weights) for weight in weights]
    if len(weights) > 1:
        sizes = [records["size"][records["source"] == i].sum() for i in range(len(weights))]
        total = min(total, *(size / share for size, share in zip(sizes, shares, strict=True)))
    for i, share in enumerate(shares):
        mine = np.flatnonzero(records["source"] == i)
        # A source that has just its share loses nothing to rounding.
        fits = np.cumsum(records["size"][mine]) <= total * share * (1 + 1e-12)
        chosen[mine[fits]] = True
    return chosen


def hold_out(records: np.ndarray, share: float) -> np.ndarray:
    """Which records are held out: about `share` of them, drawn by their prompts.  # [n] bool

    Records with the same prompt stay together. At least one prompt's are held out, if `share` is
    not 0 and there are two prompts; a prompt that has more records than are left to draw is passed
    over.
    """
    prompts, member, sizes = np.unique(records["prompt"], return_inverse=True, return_counts=True)
    drawn = np.zeros(len(prompts), bool)
    if share and len(prompts) > 1:
        due = max(1, round(share * len(records)))
        due = min(due, len(records) - 1)
        for i, size in enumerate(sizes.tolist()):  # in the order of a hash with the seed
            if size <= due:
                drawn[i] = True
                due -= size
            if not due:
                break
        if not drawn.any():
            drawn[sizes.argmin()] = True
        if drawn.all():
            drawn[sizes.argmax()] = False
    return drawn[member]
