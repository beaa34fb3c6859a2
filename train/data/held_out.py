"""Prompts and texts from held-out documents, for validation and for the benchmark."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .documents import Document
from .prefixes import Windows


class HeldOutError(ValueError):
    """Held-out documents that are too few or too short."""


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    count: int,
    prefix_tokens: int,
    seed: int = 0,
    part: Literal["bench", "validation"] = "bench",
) -> list[Tensor]:
    """`count` prompts of `prefix_tokens` tokens each, [P] int64, from held-out documents.

    Deterministic in (seed, documents). Every third document, in the order of a hash, is for
    validation and the others for the benchmark, so a checkpoint or tree is not judged by prompts
    that chose it. The documents take turns in giving windows, which do not overlap.

    Raises:
        HeldOutError: there are fewer.
    """
    prompts = _windows(tokenizer, documents, prefix_tokens, seed, part)
    if len(prompts) < count:
        raise HeldOutError(
            f"the held-out documents give {len(prompts)} {part} prompts of {prefix_tokens} tokens, "
            f"expected {count}; raise corpus.held_out or corpus.max_bytes, or use shorter prompts."
        )
    return prompts[:count]


def held_out_texts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    tokens: int,
    seed: int = 0,
    most: int = 512,
) -> list[Tensor]:
    """At most `most` texts of `tokens` tokens each, [P] int64, from the benchmark's documents."""
    return _windows(tokenizer, documents, tokens, seed, "bench")[:most]


def _windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    prefix_tokens: int,
    seed: int,
    part: str,
) -> list[Tensor]:
    """All prompts of a part, see `held_out_prompts`."""

    def order(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()

    usable = []
    for document in sorted(documents, key=lambda document: order(document.id)):
        windows = Windows(tokenizer, [document], prefix_tokens)
        starts = range(0, len(windows), prefix_tokens)
        if starts:
            names = {start: order(f"{document.id}:{start}") for start in starts}
            usable.append([windows[start] for start in sorted(starts, key=names.__getitem__)])
    mine = usable[::3] if part == "validation" else [d for i, d in enumerate(usable) if i % 3]
    turns = itertools.zip_longest(*mine)
    return [prompt for turn in turns for prompt in turn if prompt is not None]
