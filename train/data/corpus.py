"""The corpus stage: documents of one source or a mixture, without those that are there twice.

The result is `train.jsonl` and `held_out.jsonl`, one document a line. Documents are held out
whole, together with all others that begin with the same prompt, so that no part of a held-out text
is in the training set. No more than one document is in memory at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headstart.heads.core import counted

from ..recipe import Corpus, Source
from .document_files import Documents, write_documents
from .documents import CorpusError, Document
from .parsing import OF_IDS, OPENINGS
from .reading import SUPPORTED, Skipped, order, read_source, source_name
from .selection import Spool, choose, hold_out
from .target_text import sample_documents

logger = logging.getLogger(__name__)

ENDED = "ended_by_max_bytes"  # in the counts: whether more documents were there
_FULL = 0.9  # of its bytes a mixture has at least, unless a source is too small for its weight
_ENDLESS = ("stdlib", "target")  # more than any corpus of them takes


def build_corpus(
    spec: Corpus, folder: Path, seed: int = 0, first_rows: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Write the documents of `spec` into `folder` and return the counts.

    Documents are taken in the order of the hash of their id (a relative path, or file:line) until
    the next would pass `spec.max_bytes`, or its source's share of them in a mixture. Of documents
    with the same content one is kept, if `spec.dedup`. About `spec.held_out * count` are held out,
    drawn by a hash of seed and first prompt. Files that are not UTF-8 text are skipped and counted,
    rows that cannot be read only where `spec.on_error` is `skip`. Raises CorpusError.

    Args:
        first_rows: take the first documents of each source instead, in their order, and read no
            more: a sample of a large source, to look at.
        quiet: warn of nothing, since it was said when the same corpus was made before.
    """
    warn = logger.debug if quiet else logger.warning
    skipped = Skipped(spec.on_error)
    parts = spec.parts()
    names, weights = _names(parts), [part.weight for part in parts]
    budgets = [spec.max_bytes * weight / sum(weights) for weight in weights]
    spool = Spool(folder / ".documents.tmp", budgets, spec.dedup, seed)
    try:
        for i, part in enumerate(parts):
            name = names[i] if len(parts) > 1 else None
            if part.source == "target":
                assert spec.writer is not None  # the recipe filled it in
                documents = sample_documents(spec.writer, spec.opening_tokens, seed)
                found = _add(spool, i, documents, in_order=True)
            else:
                wanted = functools.partial(_is_wanted, None if first_rows else spool, i)
                documents = read_source(part, skipped, name, wanted)
                found = _add(spool, i, documents, in_order=first_rows)
            if not found:
                if skipped.rows:
                    raise CorpusError(
                        f"{part.source}: no text found; {counted(skipped.rows, 'row')} skipped, "
                        f"the first: {skipped.first}"
                    )
                raise CorpusError(f"{part.source}: no text found; expected {SUPPORTED}")
        records = spool.records()
        if skipped.rows:
            rows = counted(skipped.rows, "row")
            warn("corpus: %s skipped; the first: %s", rows, skipped.first)
        chosen = records[choose(records, weights, spec.max_bytes)]
        if not len(chosen):
            raise CorpusError(
                f"{', '.join(names)}: the first document alone has more bytes than its share of "
                f"corpus.max_bytes {spec.max_bytes}; raise corpus.max_bytes"
            )
        counts = _counts(skipped, spool.duplicates())
        if len(parts) > 1:
            counts["source_bytes"] = _shares(names, weights, chosen, spec.max_bytes, warn)
        counts[ENDED] = _ended(spec, spool, chosen)
        held_out = hold_out(chosen, spec.held_out)
        if spec.held_out and len(chosen) > 1 and not held_out.any():
            warn("corpus: all documents begin with the same prompt: none is held out")
        return counts | _write(folder, spool, chosen, held_out)
    finally:
        spool.close()


def cut_short(spec: Corpus, counts: dict[str, Any]) -> str:
    """A line where `corpus.max_bytes` has left documents out; empty otherwise."""
    if not counts[ENDED]:
        return ""
    documents = counts["train_documents"] + counts["held_out_documents"]
    return f"corpus.max_bytes {spec.max_bytes:,} ends the corpus after {documents:,} documents"


def load_documents(folder: Path, split: Literal["train", "held_out"]) -> Documents:
    """What `build_corpus` wrote, in its order; documents are read when they are asked for."""
    return Documents(folder / f"{split}.jsonl")


def _add(spool: Spool, source: int, documents: Iterable[Document], in_order: bool) -> int:
    """Add the documents of a source and return their number.

    Those that are taken `in_order` are read until no more can be chosen.
    """
    number = -1
    for number, document in enumerate(documents):
        spool.add(document, source, number if in_order else _key(document.id))
        if in_order and not spool.wants(source, number + 1):
            break
    spool.end_of(source)
    return number + 1


def _write(folder: Path, spool: Spool, chosen: np.ndarray, held_out: np.ndarray) -> dict[str, int]:
    """Write both files; returns documents and bytes of each."""
    counts: dict[str, int] = {}
    for split, taken in (("train", chosen[~held_out]), ("held_out", chosen[held_out])):
        write_documents(folder / f"{split}.jsonl", spool.lines(taken))
        counts[f"{split}_documents"] = len(taken)
        counts[f"{split}_bytes"] = int(taken["size"].sum())
    return counts


def _is_wanted(spool: Spool | None, source: int, id: str) -> bool:
    return spool is None or spool.wants(source, _key(id))


def _key(id: str) -> int:
    return int.from_bytes(order(id)[:8], "big")


def _names(parts: Sequence[Source]) -> list[str]:
    """The names of the sources, different ones."""
    names: list[str] = []
    for part in parts:
        name = source_name(part)
        names.append(name if name not in names else f"{name}#{len(names) + 1}")
    return names


def _counts(skipped: Skipped, duplicates: int) -> dict[str, Any]:
    """What was left out: whole files, rows, equal documents, and turns that open a chat."""
    openings, of_ids = skipped.counts[OPENINGS], skipped.counts[OF_IDS]
    if duplicates:
        logger.info("corpus: %d documents left out that are equal to another", duplicates)
    if openings:
        logger.info("corpus: %d answers that open a chat left out, with no question", openings)
    if of_ids:
        logger.info("corpus: %d rows are read by their token ids alone", of_ids)
    counts = {"skipped": len(skipped.files), "skipped_rows": skipped.rows}
    return counts | {"duplicates": duplicates, OPENINGS: openings, OF_IDS: of_ids}


def _ended(spec: Corpus, spool: Spool, chosen: np.ndarray) -> bool:
    """Whether `spec.max_bytes` has left out documents; not the weights of a mixture."""
    parts = spec.parts()
    full = len(parts) == 1 or chosen["size"].sum() >= _FULL * spec.max_bytes
    own = [i for i, part in enumerate(parts) if part.source not in _ENDLESS]
    return bool(full) and any(spool.ended(i) for i in own)


def _shares(
    names: list[str],
    weights: list[float],
    chosen: np.ndarray,
    max_bytes: int,
    warn: Callable[..., object],
) -> dict[str, int]:
    """The bytes of each source; says which one is too small for `max_bytes`, if one is."""
    sizes = [int(chosen["size"][chosen["source"] == i].sum()) for i in range(len(names))]
    total = sum(sizes)
    if total < _FULL * max_bytes:
        least = max(range(len(names)), key=lambda i: sizes[i] / weights[i])
        warn(
            "corpus: %d of %d bytes: %s has no more than %d, and the weights are shares of bytes; "
            "lower its weight to take more of the others",
            total, max_bytes, names[least], sizes[least],
        )  # fmt: skip
    return dict(zip(names, sizes, strict=True))
