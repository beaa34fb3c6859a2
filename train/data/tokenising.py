"""Texts as token ids: many at a time, in as little memory as their number allows."""

from __future__ import annotations

import io
import itertools
import re
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .documents import in_groups
from .words import Words, are_apart

_TOGETHER = 1 << 20  # characters that are tokenised at once
_IN_MEMORY = 1 << 24  # bytes of ids; more are kept in a file without a name

Given = TypeVar("Given")
Made = TypeVar("Made")

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


class Encoder:
    """The ids of texts as a tokenizer gives them, of many texts at once.

    Tokens that it adds behind a text, as some do with the end-of-text token, are left out: what
    follows the text follows it without them.

    What stands between two tokens that the tokenizer has as a whole, such as `<|im_end|>`, it
    tokenises apart from the rest. So a tokenizer of the `tokenizers` library is given such parts,
    each with the whole token before it, and equal ones of a call once: the prompts of one chat
    share all but their last turns.

        <s>Hi<|end|>Ho<|end|>       three parts: `<s>Hi`, `<|end|>Ho` and `<|end|>`

    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        own = getattr(type(tokenizer), "_encode_plus", None)
        self.backend: Any = None  # of the `tokenizers` library, where it is called directly
        self.words: Words | None = None
        self.behind = _added_behind(tokenizer)
        if own is PreTrainedTokenizerFast._encode_plus:
            self.backend = tokenizer.backend_tokenizer
            self.whole = _whole_tokens(self.backend)
            self.words = Words(self._bare) if are_apart(self.backend) else None

    def __call__(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """The ids of each text, [L] int32."""
        found: list[Any] = [None] * len(texts)
        for special in {special for _, special in texts}:
            places = [at for at, (_, kind) in enumerate(texts) if kind is special]
            rows = self._alike([texts[at][0] for at in places], special)
            behind = self.behind if special else 0
            for place, row in zip(places, rows, strict=True):
                ids = np.frombuffer(row, np.int32)
                found[place] = ids[: len(ids) - behind]
        return found

    def ahead(self, make: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
        """`make` of each item, which tokenises it, in order; while the next are read, if that pays.

        Words are looked up in Python, which gains nothing from a thread.
        """
        return (_made_ahead if self.words is None else map)(make, given)

    def _alike(self, texts: list[str], special: bool) -> list[bytes]:
        """The ids of each text, as bytes of int32."""
        tokenizer: Any = self.tokenizer
        if self.backend is None:
            rows = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
            return [_packed(row) for row in rows]
        if special and self.backend.num_special_tokens_to_add(False):
            return self._each(texts, True)
        if self.whole is None:
            return self._in_words(texts)
        parts = list(self.whole.parts(texts))
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
        ids = dict(zip(distinct, self._in_words(distinct), strict=True))
        return [b"".join(map(ids.__getitem__, each)) for each in parts]

    def _in_words(self, texts: list[str]) -> list[bytes]:
        return self._bare(texts) if self.words is None else self.words(texts)

    def _bare(self, texts: list[str]) -> list[bytes]:
        return self._each(texts, False)

    def _each(self, texts: list[str], special: bool) -> list[bytes]:
        self.tokenizer([""])  # turns truncation and padding off, as it does before each batch
        found = self.backend.encode_batch_fast(texts, add_special_tokens=special)
        return [_packed(encoding.ids) for encoding in found]


def prompt_tokens(tokenizer: Any, text: str, special: bool) -> Any:
    """The `input_ids` [1, P] of a prompt, and their mask, without tokens that are added behind it.

    Args:
        special: whether the tokenizer adds any; a chat template has written its own.
    """
    found = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False)
    if special and (behind := _added_behind(tokenizer)):
        for name, entries in found.items():
            found[name] = entries[:, :-behind]
    return found


def _added_behind(tokenizer: Any) -> int:
    """How many tokens a tokenizer adds behind a text."""
    whole, bare = (
        tokenizer(["a"], add_special_tokens=special, verbose=False)["input_ids"][0]
        for special in (True, False)
    )
    added = len(whole) - len(bare) if bare else 0
    before = next((at for at in range(added) if whole[at : at + len(bare)] == bare), added)
    return added - before


def _packed(ids: list[int]) -> bytes:
    """Ids as bytes of int32."""
    return array("i", ids).tobytes()


@dataclass(frozen=True)
class _Whole:
    """The tokens that are found in a text before all else, and those of them to cut before."""

    pattern: re.Pattern[str]
    cut: frozenset[str]

    def parts(self, texts: Iterable[str]) -> Iterator[list[str]]:
        """Each text's parts, each with the token before which it is cut; one of an empty text.

        A text that begins with all of the one before it is looked at from that one's last part on.
        """
        before, parts = "", [""]
        for text in texts:
            known = parts[:-1] if text.startswith(before) else []
            rest = text[len(before) - len(parts[-1]) :] if known else text
            before, parts = text, [*known, *self._parts(rest)]
            yield parts

    def _parts(self, text: str) -> list[str]:
        found = [match.start() for match in self.pattern.finditer(text) if match[0] in self.cut]
        places = itertools.pairwise([0, *found, len(text)])
        return [text[start:end] for start, end in places if end > start or not text]


def _whole_tokens(backend: Any) -> _Whole | None:
    """None where a text is not cut.

    Tokens that are looked for in normalized text, that want to be words of their own, or that take
    the spaces before them depend on what stands there, and are not cut before.
    """
    known = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    known = [token for token in known if not token.normalized]
    spaces = any(token.content[0].isspace() for token in known)
    if backend.encode_special_tokens or (spaces and any(token.rstrip for token in known)):
        return None
    # Where several begin at a place, the tokenizer finds the longest.
    contents = sorted((token.content for token in known), key=len, reverse=True)
    # One that another holds may be a part of that, once more text follows.
    said = "\n".join(contents)
    alone = [token for token in known if said.count(token.content) == 1]
    cut = frozenset(t.content for t in alone if not (t.lstrip or t.single_word))
    return _Whole(re.compile("|".join(map(re.escape, contents))), cut) if cut else None


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
    encoder = Encoder(tokenizer)
    together = in_groups(texts, lambda text: len(text[0]), _TOGETHER)
    return itertools.chain.from_iterable(encoder.ahead(encoder, together))


def _made_ahead(make: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
    """`make` of each item, in order, in a thread of its own while the next items are read."""
    with ThreadPoolExecutor(1) as pool:
        due: deque[Future[Made]] = deque()
        for item in given:
            due.append(pool.submit(make, item))
            if len(due) > 1:
                yield due.popleft().result()
        for made in due:
            yield made.result()
