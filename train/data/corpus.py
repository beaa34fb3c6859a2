"""The corpus stage: documents from the standard library, a file, a folder, or the target itself.

The result is `train.jsonl` and `held_out.jsonl`, one document a line. Documents are held out
whole, so that no part of a held-out text is in the training set.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from headstart.heads.core.files import write_atomically

from ..recipe import Corpus
from .documents import CorpusError, Document
from .reading import SUPPORTED, Skipped, order, read_source

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]


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
    for document in _read(spec, seed, skipped):
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
        raise CorpusError(f"{spec.source}: no text found{first}; expected {SUPPORTED}")
    held_out = _hold_out(chosen, spec.held_out, seed)
    parts: dict[Split, list[Document]] = {
        "train": [document for document in chosen if document.id not in held_out],
        "held_out": [document for document in chosen if document.id in held_out],
    }
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


def _read(spec: Corpus, seed: int, skipped: Skipped) -> Iterator[Document]:
    if spec.source != "target":
        return read_source(spec.source, skipped)
    from .sampled_corpus import sample_documents  # loads torch

    assert spec.writer is not None  # the recipe filled it in
    return sample_documents(spec.writer, spec.opening_tokens, seed)


def _hold_out(documents: list[Document], share: float, seed: int) -> set[str]:
    if share == 0 or len(documents) < 2:
        return set()
    count = min(max(1, round(share * len(documents))), len(documents) - 1)
    return set(sorted((d.id for d in documents), key=lambda name: order(f"{seed}:{name}"))[:count])
