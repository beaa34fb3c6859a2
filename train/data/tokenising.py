"""Texts as token ids: many at a time, in as little memory as their number allows."""

from __future__ import annotations

import io
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, overload

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_TOGETHER = 1 << 20  # characters that are tokenised at once
_IN_MEMORY = 1 << 24  # bytes of ids; more are kept in a file without a name

Text = tuple[str, bool]
"""A text, and whether the tokenizer adds its special tokens."""


class Ragged(Sequence[np.ndarray]):
    """Rows of token ids of any length, [L] int32 each: parts of one array.

    Args:
        ids: of all rows, in memory or memory-mapped.
        starts, lengths: [n], where each row begins, and how long it is.
    """

    def __init__(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray):
        self.ids, self.starts, self.lengths = ids, starts, lengths

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, number: slice) -> Ragged: ...
    def __getitem__(self, number: int | slice) -> np.ndarray | Ragged:
        if isinstance(number, slice):
            return Ragged(self.ids, self.starts[number], self.lengths[number])
        start = self.starts[number]
        return self.ids[start : start + self.lengths[number]]

    def select(self, chosen: np.ndarray) -> Ragged:
        """The rows of these numbers, or of this mask."""
        return Ragged(self.ids, self.starts[chosen], self.lengths[chosen])

    def first(self, count: int) -> Ragged:
        """The first `count` tokens of each row; none of a row that is shorter."""
        return Ragged(self.ids, self.starts, np.where(self.lengths < count, 0, count))

    def tolist(self) -> list[list[int]]:
        return [row.tolist() for row in self]


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Text]) -> Ragged:
    """The token ids of texts, which are read one by one.

    A tokenizer of the `tokenizers` library uses all its threads, and tokenises while the next texts
    are made. Many ids are kept in a temporary file, memory-mapped, so that they take no memory of
    the process.
    """
    file: Any = io.BytesIO()
    lengths = []
    for ids in _encoded(tokenizer, texts):
        lengths.append(len(ids))
        file.write(ids.tobytes())
        if isinstance(file, io.BytesIO) and file.tell() > _IN_MEMORY:
            memory, file = file, tempfile.TemporaryFile(prefix="headstart-")  # noqa: SIM115
            file.write(memory.getbuffer())
    if isinstance(file, io.BytesIO):
        all_ids = np.frombuffer(file.getvalue(), np.int32)
    else:
        file.flush()
        all_ids = np.memmap(file, np.int32, "r").view(np.ndarray)
    sizes = np.array(lengths, np.int64)
    return Ragged(all_ids, np.cumsum(sizes) - sizes, sizes)


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Text]) -> Iterator[np.ndarray]:
    with ThreadPoolExecutor(1) as pool:
        due: deque[Future[list[np.ndarray]]] = deque()
        for batch in _together(texts):
            due.append(pool.submit(_encode, tokenizer, batch))
            if len(due) > 1:
                yield from due.popleft().result()
        for batch in due:
            yield from batch.result()


def _together(texts: Iterable[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text[0])
        if size >= _TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: PreTrainedTokenizerBase, batch: list[Text]) -> list[np.ndarray]:
    found: list[Any] = [None] * len(batch)
    for special in {special for _, special in batch}:
        places = [i for i, (_, kind) in enumerate(batch) if kind is special]
        rows = _ids(tokenizer, [batch[i][0] for i in places], special)
        for place, row in zip(places, rows, strict=True):
            found[place] = np.array(row, np.int32)
    return found


def _ids(tokenizer: Any, texts: list[str], special: bool) -> Iterator[list[int]]:
    """Each text's ids. Those of a whole batch, as lists of Python's integers, would be 28 bytes."""
    own = getattr(type(tokenizer), "_encode_plus", None)
    if own is not PreTrainedTokenizerFast._encode_plus:
        yield from tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return
    tokenizer([""])  # turns truncation and padding off, as it does before each of its batches
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=special):
        yield encoding.ids
