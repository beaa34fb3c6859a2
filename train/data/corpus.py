"""The corpus stage: documents from the standard library, a file, a folder, or a model's own text.

The result is `train.jsonl` and `held_out.jsonl`, one document a line. Documents are held out
whole, so that no part of a held-out text is in the training set.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.heads.core import load_pretrained, row_seeds
from headstart.heads.core.files import write_atomically
from headstart.infer import Speculator

from ..recipe import Corpus, Distill
from .documents import CorpusError, Document
from .reading import SUPPORTED, Skipped, order, read_source
from .training_rows import write_rows

logger = logging.getLogger(__name__)

_BATCH = 64  # texts that a model samples at once


def build_corpus(spec: Corpus, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Write the documents of `spec.source` into `folder` and return the counts.

    Documents are taken in the order of the hash of their id (a relative path, or file:line) until
    the next would pass `spec.max_bytes`; of these, `round(spec.held_out * count)` are held out,
    drawn by a hash of seed and id (at least one, if `held_out` is not 0 and there are two). Files
    that are not UTF-8 text are skipped and counted, rows that cannot be read only where
    `spec.on_error` is `skip`. Raises CorpusError.
    """
    skipped = Skipped(spec.on_error)
    if spec.source == "target":
        assert spec.writer is not None  # the recipe filled it in
        documents = sample_documents(spec.writer, spec.opening_tokens, seed)
    else:
        documents = read_source(spec.source, skipped)
    chosen: list[Document] = []
    size = 0
    for document in documents:
        size += len(document.whole().encode())
        if size > spec.max_bytes:
            if not chosen:
                raise CorpusError(
                    f"{document.id}: {size} bytes, more than corpus.max_bytes {spec.max_bytes}; "
                    "raise corpus.max_bytes"
                )
            break
        chosen.append(document)
    bad = len(skipped.rows)
    if bad:
        logger.warning("corpus: %d rows skipped; the first: %s", bad, skipped.rows[0])
    if not chosen:
        first = f"; {bad} rows skipped, {skipped.rows[0]}" if bad else ""
        raise CorpusError(f"{spec.source}: no text found{first}; expected {SUPPORTED}")
    count = min(max(1, round(spec.held_out * len(chosen))), len(chosen) - 1) if spec.held_out else 0
    drawn = sorted((document.id for document in chosen), key=lambda id: order(f"{seed}:{id}"))
    held_out = set(drawn[:count])
    counts: dict[str, Any] = {"skipped": len(skipped.files), "skipped_rows": bad}
    for split in ("train", "held_out"):
        part = [document for document in chosen if (document.id in held_out) == (split != "train")]
        lines = [json.dumps(asdict(document)) + "\n" for document in part]
        write_atomically(folder / f"{split}.jsonl", "".join(lines))
        counts[f"{split}_documents"] = len(part)
        counts[f"{split}_bytes"] = sum(len(document.whole().encode()) for document in part)
    return counts


def load_documents(folder: Path, split: Literal["train", "held_out"]) -> list[Document]:
    """Read back what `build_corpus` wrote, in its order."""
    with open(folder / f"{split}.jsonl", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def sample_documents(name: str, tokens: int, seed: int) -> Iterator[Document]:
    """Different texts of `tokens` tokens that the model `name` writes, without end.

    It ends only where the model repeats itself. Text i is sampled at temperature 1 after the start
    token, which is left out, with a seed made of (seed, i), and cut at an end-of-text or a second
    start token. Of texts that agree in their first three quarters one is kept, so that held-out
    prefixes of that length are not those that were trained on. Raises CorpusError where the
    tokenizer has no start token.
    """
    tokenizer = load_pretrained(AutoTokenizer, name)
    start = tokenizer.bos_token_id
    if start is None:
        raise CorpusError(
            f"corpus.source is target, but the tokenizer of {name} has no start token to write "
            "from; give a text file instead"
        )
    model: PreTrainedModel = load_pretrained(AutoModelForCausalLM, name).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    speculator = Speculator(model)
    spec = Distill(prefix_tokens=1, new_tokens=tokens, temperature=1.0)
    ends = {start, tokenizer.eos_token_id}
    seen: set[str] = set()
    for first in itertools.count(0, _BATCH):
        seeds = row_seeds(seed, first + _BATCH).tolist()[first:]
        text, *_ = write_rows(speculator, [torch.tensor([start])] * _BATCH, seeds, spec)
        known = len(seen)
        for row, ids in enumerate(text[:, 1:].tolist(), start=first):
            end = next((at for at, token in enumerate(ids) if token in ends), tokens)
            begun, words = tokenizer.batch_decode(
                [ids[: min(end, tokens * 3 // 4)], ids[:end]], skip_special_tokens=True
            )
            if words.strip() and begun not in seen:
                seen.add(begun)
                yield Document(f"target:{row}", words)
        if len(seen) == known:
            return
