"""How often each token occurs in a text, and how well the most frequent ones cover text like it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.parts.vocabulary import most_frequent
from headstart.infer.measure.progress import progress_bar

from .document_files import is_indexed
from .documents import CorpusError, Document, render_chat
from .reading import read_documents
from .training_rows import Rows, holds_shards

_TENTH = 10
_BATCH = 256  # documents that are encoded at once


@dataclass(frozen=True)
class TokenCounts:
    """Tokens counted in two parts of a text: every tenth document or row, and the others.

    Attributes:
        others, tenth: [V] int64.
        known: the ids that may be chosen; all where it is None.
        ends: ids that are chosen first, which many texts leave out: those that end an answer.
    """

    others: Tensor
    tenth: Tensor
    known: Tensor | None = None
    ends: Collection[int] = ()

    def chosen(self, size: int) -> Tensor:
        """The ids of the `size` most frequent tokens, ascending: [size]."""
        return self._best(self.others + self.tenth, size)

    def coverage(self, size: int) -> float | None:
        """The share of the tenth that is among the `size` tokens that the others would choose.

        None where there are fewer than ten documents.
        """
        whole = self.tenth.sum().item()
        if not whole:
            return None
        return self.tenth[self._best(self.others, size)].sum().item() / whole

    def _best(self, counts: Tensor, size: int) -> Tensor:
        ranks = counts.clone()
        ranks[list(self.ends)] = counts.max() + 1
        if self.known is not None:
            known = torch.zeros(len(counts), dtype=torch.bool)
            known[self.known.cpu()] = True
            ranks[~known] = -1
        return most_frequent(ranks, size)


def count_tokens(source: Path, tokenizer: Any, vocabulary: int, **choice: Any) -> TokenCounts:
    """The counts of a file or folder of text, or of rows that `headstart distill` wrote.

    Chats go through the tokenizer's template, if it has one. Of rows only the tokens that are
    learnt count, which the target has written, and of a run's corpus only the documents to train
    on.

    Args:
        vocabulary: V; ids beyond it are left out.
        choice: see `TokenCounts`.

    Raises:
        CorpusError, DistillError: there is no text, or it cannot be read.
    """
    texts: Rows | list[Document]
    if holds_shards(source):
        texts = Rows.load(source)
        rows = map(texts.row, range(len(texts)))
        found = (row.tokens[row.supervised] for row in rows)
    else:
        own = source / "train.jsonl"
        texts = read_documents(own if is_indexed(own) else source, answers=True)
        found = _of_documents(texts, tokenizer)
    counts = np.zeros((2, vocabulary), np.int64)
    bar = progress_bar(len(texts), "Counting tokens", "text")
    for number, ids in enumerate(found):
        part = int(number % _TENTH == _TENTH - 1)
        counts[part] += np.bincount(ids, minlength=vocabulary)[:vocabulary]
        bar.update()
    bar.close()
    if not counts.any():
        raise CorpusError(f"{source} holds no text; expected texts, prompts or chats.")
    others, tenth = torch.from_numpy(counts)
    return TokenCounts(others, tenth, **choice)


def _of_documents(documents: list[Document], tokenizer: Any) -> Iterator[np.ndarray]:
    for first in range(0, len(documents), _BATCH):
        texts = [_text(document, tokenizer) for document in documents[first : first + _BATCH]]
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids:
            yield np.asarray(ids, np.int64)


def _text(document: Document, tokenizer: Any) -> str:
    if document.messages and tokenizer.chat_template:
        return render_chat(tokenizer, document.messages, document.tools)
    return document.whole()
