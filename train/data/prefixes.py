"""What a target continues to write training text: prefixes of documents; and chats as prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..recipe import Chat, Distill
from .documents import (
    ChatTemplateError,
    Document,
    DroppedCallsError,
    EndlessTemplateError,
    each_in_time,
)
from .rendering import ChatRenderer
from .tokenising import Ragged, Text, tokenise


class DistillError(ValueError):
    """Self-distillation that cannot be done as asked."""


class Windows:
    """Every window of `length` tokens that lies within one row, numbered through all rows.

    `skipped` counts the rows that are too short to have one.
    """

    def __init__(self, rows: Ragged, length: int):
        self.rows, self.length = rows, length
        self.ends = np.cumsum(np.maximum(rows.lengths - length + 1, 0))
        self.skipped = int((rows.lengths < length).sum())

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, number: int) -> Tensor:
        """Window `number`.  # [length]"""
        row = int(np.searchsorted(self.ends, number, "right"))
        start = number - (self.ends[row - 1] if row else 0)
        return _tensor(self.rows[row][start : start + self.length])

    def draw(self, count: int, seed: int) -> list[int]:
        """Numbers of `count` windows, any of them, perhaps twice."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self), (count,), generator=generator).tolist()


class Prompts:
    """Rows that are prefixes as they are.

    Empty ones, and those of more than `length` tokens, are left out; `skipped` counts them.
    """

    def __init__(self, rows: Ragged, length: int):
        self.rows = rows.select((rows.lengths >= 1) & (rows.lengths <= length))
        self.skipped = len(rows) - len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        """Prompt `number`.  # [P], P at most `length`"""
        return _tensor(self.rows[number])

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
    length = spec.prefix_tokens
    texts: Iterable[Document] = documents
    if spec.prefix == "prompt":
        texts = (prompt for document in documents for prompt in document.prompts())
    rows = encode(tokenizer, texts, spec.chat, chat)
    if spec.prefix == "start":
        rows = rows.first(length)  # empty where a document is too short, which Prompts leaves out
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
    documents: Iterable[Document],
    how: str = "auto",
    chat: Chat | None = None,
) -> Ragged:
    """Token ids of whole documents, with the start token where the tokenizer sets one.

    A chat is rendered by the tokenizer's template, as `plain_chat` does it (`plain`), or by the
    template where there is one (`auto`); one that ends with the user's turn is encoded up to where
    the answer begins. Raises DistillError where there is no template, or it refuses a chat; one
    that is left out (`chat.refused`) has no ids.
    """
    renderer = chat_renderer(tokenizer, chat, how)

    def text(document: Document) -> Text:
        if renderer.plain or not document.messages:
            return document.whole(), True
        due = document.messages[-1]["role"] != "assistant"
        # A template writes the special tokens itself.
        return renderer.texts_in_any_time([document.messages], due, document.tools)[0], False

    texts = each_in_time(text, documents, partial(leave_out, renderer))
    return tokenise(tokenizer, (text or ("", False) for _, text in texts))


def _tensor(row: np.ndarray) -> Tensor:
    return torch.from_numpy(row.astype(np.int64))


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None, how: str = "auto"
) -> ChatRenderer:
    """The renderer of a recipe's chats; its refusals of a tokenizer are raised as DistillError."""
    try:
        return ChatRenderer(tokenizer, chat, how)
    except ChatTemplateError as error:
        raise DistillError(str(error)) from None


def leave_out(
    renderer: ChatRenderer,
    document: Document,
    error: ChatTemplateError,
    remedy: str = "drop the row",
) -> None:
    """Raise DistillError for a chat that a template refuses, unless such chats are left out.

    Args:
        remedy: what the error says to do, beside what settings of the recipe may help.
    """
    if renderer.chat.refused == "skip" and not isinstance(error, EndlessTemplateError):
        return
    how = "set chat.refused=skip, or set distill.chat=plain"
    if renderer.plain or isinstance(error, DroppedCallsError):  # which plain chats do not help
        how = "or set chat.refused=skip"
    raise DistillError(f"{document.id}: {error}; {remedy}, {how}.") from None
