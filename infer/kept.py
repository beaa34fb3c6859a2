"""Texts whose keys, values and features are kept, for prompts that begin as they do."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import psutil
import torch
from torch import nn

from headstart.heads import SlabCache
from headstart.heads.core import free_bytes, in_steps

from .rows import Rows

MOST = 16
"""Copies that are kept of earlier texts."""

_SHARE = 4  # copies take at most one part in so many of the memory that is left
_LEAST = in_steps(1)  # so few tokens are not worth a copy
_OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def weights_now(model: nn.Module) -> Hashable:
    """What is another once a model's weights have changed, or which of its adapters it uses.

    It does not see weights that are streamed in for each forward, nor what is written through
    `.data` in place.
    """
    found: list[Hashable] = []
    for part in model.modules():
        for weight in (*part._parameters.values(), *part._buffers.values()):
            if weight is None or weight.is_meta:
                continue
            place = weight.data_ptr() if type(weight) in (nn.Parameter, torch.Tensor) else 0
            found.append((id(weight), place, 0 if weight.is_inference() else weight._version))
        if isinstance(getattr(type(part), "active_adapters", None), property):  # a layer of peft
            found.append(repr([getattr(part, name, None) for name in _OF_ADAPTERS]))
    return tuple(found)


class KeptText:
    """A text in a row of a cache, as long as that holds no other.

    Args:
        tokens: [T] int64, whose keys and values are cached.

    Attributes:
        rows: where the tokens are a prompt, what is written after it, in row 0.
    """

    def __init__(self, tokens: np.ndarray, slab: SlabCache):
        self._first, self.slab, self._contents = tokens, slab, slab.contents
        self.rows: Rows | None = None

    @property
    def tokens(self) -> np.ndarray:
        """[T] those that are cached now: of what was written, all but the last one."""
        if self.slab.contents is not self._contents:
            return self._first[:0]
        if self.rows is None:
            return self._first
        text = np.concatenate([self._first, self.rows.written(0)])
        # Where an interrupt came in between, the one number may be ahead of the other.
        cached = min(len(text) - 1, int(self.rows.positions[0]))
        return text[: max(cached, len(self._first))]

    def begins(self, tokens: np.ndarray) -> int:
        """How many tokens of a prompt [T'] it begins with; the prompt's last one is run."""
        own = self.tokens
        most = min(len(own), len(tokens) - 1)
        return int(np.logical_and.accumulate(own[:most] == tokens[:most]).sum())


class KeptTexts:
    """The last text, where it lies in the target's own cache, and copies of earlier ones.

    Copies take at most a quarter of the memory that is left. Those that were used longest ago go
    first.

    Args:
        copies: how many.

    Attributes:
        last: None where none is kept.
    """

    def __init__(self, copies: int = MOST):
        self._most, self._copies = copies, list[KeptText]()  # the last used at the end
        self.last: KeptText | None = None
        self._weights: Hashable = None

    def __bool__(self) -> bool:
        return self.last is not None or bool(self._copies)

    def clear(self) -> None:
        self.last = None
        self._copies.clear()

    def check(self, model: nn.Module) -> None:
        """Keep nothing that a model with other weights has computed."""
        if (now := weights_now(model)) != self._weights:
            self.clear()
            self._weights = now

    def find(self, tokens: np.ndarray) -> tuple[KeptText | None, int]:
        """The text that most tokens of a prompt [T] begin with, and how many."""
        texts = [*self._copies, *([] if self.last is None else [self.last])]
        found = [(text.begins(tokens), number) for number, text in enumerate(texts)]
        known, number = max(found, default=(0, 0))
        return (texts[number], known) if known else (None, 0)

    def use(self, text: KeptText, known: int) -> None:
        """So many of a copy's tokens are needed: it stays longest, or not at all if all are."""
        if text in self._copies:
            self._copies.remove(text)
            if known < len(text.tokens):
                self._copies.append(text)

    def leave(self, known: int = 0) -> None:
        """Copy the last text before the cache loses it, but for its first `known` tokens."""
        last, self.last = self.last, None
        if last is not None and len(tokens := last.tokens) >= known + _LEAST:
            self.copy(tokens, last.slab, 0)

    def copy(self, tokens: np.ndarray, slab: SlabCache, row: int) -> None:
        """Keep a copy of a text [T] in a row of a cache, where there is memory for it."""
        more = np.append(tokens, -1)
        if not self._most or any(t.begins(more) == len(tokens) for t in self._copies):
            return
        self._copies = [t for t in self._copies if t.begins(tokens) < len(t.tokens)]
        needed = slab.bytes_of(1, in_steps(len(tokens)))
        held = sum(text.slab.bytes_of(1, text.slab.capacity) for text in self._copies)
        most = (_memory_left(slab) + held) // _SHARE
        while self._copies and (len(self._copies) >= self._most or held + needed > most):
            own = self._copies.pop(0).slab
            held -= own.bytes_of(1, own.capacity)
        if needed > most:
            return
        try:
            own = slab.like(1, in_steps(len(tokens)))
            own.take(slab, row, len(tokens))
        except torch.OutOfMemoryError:
            self._copies.clear()
        else:
            self._copies.append(KeptText(tokens, own))

    def make_room(self, slab: SlabCache, needed: int) -> None:
        """Give copies up where a cache needs so many bytes, and more than half of what is left."""
        while self._copies and 2 * needed > _memory_left(slab):
            self._copies.pop(0)


def _memory_left(slab: SlabCache) -> int:
    """Bytes that are free where a cache lies."""
    free = [free_bytes(device) for device in slab.devices]
    host = psutil.virtual_memory().available
    return min(host if each is None else each for each in free)
