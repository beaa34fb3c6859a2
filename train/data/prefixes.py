"""What models continue: prefixes of documents, to distill from or, held out, to measure with."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..recipe import Chat, Distill
from .documents import ChatTemplateError, Document
from .reading import order
from .rendering import ChatRenderer


class DistillError(ValueError):
    """Self-distillation that cannot be done as asked."""


class HeldOutError(ValueError):
    """Held-out documents that are too few or too short."""


class Windows:
    """Every window of `length` tokens that lies within one row, numbered through all rows.

    `skipped` counts the rows that are too short to have one.
    """

    def __init__(self, rows: Sequence[list[int]], length: int):
        self.rows, self.length = rows, length
        self.ends = list(itertools.accumulate(max(len(row) - length + 1, 0) for row in rows))
        self.skipped = sum(len(row) < length for row in rows)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: int) -> Tensor:
        """Window `number`.  # [length]"""
        row = bisect_right(self.ends, number)
        start = number - (self.ends[row - 1] if row else 0)
        return torch.tensor(self.rows[row][start : start + self.length])

    def draw(self, count: int, seed: int) -> list[int]:
        """Numbers of `count` windows, any of them, perhaps twice."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self), (count,), generator=generator).tolist()


class Prompts:
    """Rows that are prefixes as they are.

    Empty ones, and those of more than `length` tokens, are left out; `skipped` counts them.
    """

    def __init__(self, rows: Sequence[list[int]], length: int):
        self.rows = [row for row in rows if 1 <= len(row) <= length]
        self.skipped = len(rows) - len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        """Prompt `number`.  # [P], P at most `length`"""
        return torch.tensor(self.rows[number])

    def draw(self, count: int, seed: int) -> list[int]:
        """Numbers of `count` prompts: all of them in a drawn order before any comes again."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        return [order[i % len(order)] for i in range(count)]


def make_prefixes(
    spec: Distill,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    chat: Chat | None = None,
) -> Windows | Prompts:
    """The prefixes of `spec.prefix`. Raises DistillError when the documents give none.

    - `window`: `prefix_tokens` tokens from anywhere in a document.
    - `start`: the first `prefix_tokens` of a document, with the start token if there is one.
    - `prompt`: all up to an answer, if that is at most `prefix_tokens`: of a chat, for every turn
      of the assistant; of a prompt that came with its answer, the prompt; of a text, all of it.
    """
    length, texts = spec.prefix_tokens, documents
    if spec.prefix == "prompt":
        texts = [prompt for document in documents for prompt in document.prompts()]
    rows = encode(tokenizer, texts, spec.chat, chat)
    if spec.prefix == "start":  # too short a row is made empty, which Prompts leaves out
        rows = [row[:length] if len(row) >= length else [] for row in rows]
    prefixes = Windows(rows, length) if spec.prefix == "window" else Prompts(rows, length)
    if not len(prefixes):
        few = "at most" if spec.prefix == "prompt" else "at least"
        raise DistillError(
            f"distill.prefix_tokens is {length}, and none of the {len(documents)} training "
            f"documents gives a {spec.prefix} of {few} so many tokens; change it, or the corpus."
        )
    return prefixes


def encode(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    how: str = "auto",
    chat: Chat | None = None,
) -> list[list[int]]:
    """Token ids of whole documents, with the start token where the tokenizer sets one.

    A chat is rendered by the tokenizer's template, as `plain_chat` does it (`plain`), or by the
    template where there is one (`auto`); one that ends with the user's turn is encoded up to where
    the answer begins. Raises DistillError where there is no template, or it refuses a chat.
    """
    renderer = chat_renderer(tokenizer, chat, how)
    plain, templated = {}, {}  # texts, by the number of their document
    for i, document in enumerate(documents):
        if renderer.plain or not document.messages:
            plain[i] = document.whole()
            continue
        due = document.messages[-1]["role"] == "user"
        try:
            templated[i] = renderer.text(document.messages, prompt=due)
        except ChatTemplateError as error:
            said = f"{document.id}: {error}; drop the row, or set distill.chat=plain."
            raise DistillError(said) from None
    rows: dict[int, list[int]] = {}
    for texts in filter(None, (plain, templated)):  # a template writes the special tokens itself
        ids = tokenizer(list(texts.values()), add_special_tokens=texts is plain, verbose=False)
        rows |= zip(texts, ids["input_ids"], strict=True)
    return [rows[i] for i in range(len(documents))]


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None, how: str = "auto"
) -> ChatRenderer:
    """The renderer of a recipe's chats; its refusals of a tokenizer are raised as DistillError."""
    try:
        return ChatRenderer(tokenizer, chat, how)
    except ChatTemplateError as error:
        raise DistillError(str(error)) from None


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    count: int,
    prefix_tokens: int,
    seed: int = 0,
    part: Literal["bench", "validation"] = "bench",
) -> list[Tensor]:
    """The first `count` of `held_out_texts`; raises HeldOutError where there are fewer."""
    prompts = held_out_texts(tokenizer, documents, prefix_tokens, seed, part)
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
    part: Literal["bench", "validation"] = "bench",
) -> list[Tensor]:
    """Texts of `tokens` tokens each, [P] int64, from held-out documents.

    Deterministic in (seed, documents). Every third document, in the order of a hash, is for
    validation and the others for the benchmark, so a checkpoint or tree is not judged by texts that
    chose it. The documents take turns in giving windows, which do not overlap.
    """
    documents = sorted(documents, key=lambda document: order(f"{seed}:{document.id}"))
    usable = []
    for document, row in zip(documents, encode(tokenizer, documents), strict=True):
        starts = range(0, len(row) - tokens + 1, tokens)
        drawn = sorted(starts, key=lambda start: order(f"{seed}:{document.id}:{start}"))
        if drawn:
            usable.append([torch.tensor(row[start : start + tokens]) for start in drawn])
    mine = usable[::3] if part == "validation" else [d for i, d in enumerate(usable) if i % 3]
    turns = itertools.zip_longest(*mine)
    return [text for turn in turns for text in turn if text is not None]
