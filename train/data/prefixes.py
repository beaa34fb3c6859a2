"""The prefixes that the target continues: windows of text, beginnings, or prompts of chats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..recipe import Distill
from .chats import ChatTemplateError, render_chat
from .documents import Document


class DistillError(ValueError):
    """Self-distillation that cannot be done as asked."""


class Windows:
    """Every window of `length` tokens that lies within one document.

    Windows are numbered through all documents; short documents have none, and `skipped` counts
    them.

    Args:
        chat: see `encode`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[Document],
        length: int,
        chat: str = "auto",
    ):
        self.rows = encode(tokenizer, documents, chat)
        self.length = length
        self.ends = list(accumulate(max(len(row) - length + 1, 0) for row in self.rows))
        self.skipped = sum(len(row) < length for row in self.rows)

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
    """Prefixes that are taken whole, each of its own length.

    Args:
        rows: token ids; empty ones, and those of more than `length` tokens, are left out, and
            `skipped` counts them.
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
    spec: Distill, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> Windows | Prompts:
    """The prefixes of `spec.prefix`. Raises DistillError when the documents give none.

    - `window`: `prefix_tokens` tokens from anywhere in a document.
    - `start`: the first `prefix_tokens` of a document, with the start token if there is one.
    - `prompt`: all up to an answer, if that is at most `prefix_tokens`: of a chat, for every turn
      of the assistant; of a prompt that came with its answer, the prompt; of a text, all of it.
    """
    length = spec.prefix_tokens
    if spec.prefix == "window":
        prefixes: Windows | Prompts = Windows(tokenizer, documents, length, spec.chat)
    elif spec.prefix == "start":
        rows = encode(tokenizer, documents, spec.chat)
        # Too short a row is made empty, which Prompts leaves out.
        prefixes = Prompts([row[:length] if len(row) >= length else [] for row in rows], length)
    else:
        prompts = [prompt for document in documents for prompt in document.prompts()]
        prefixes = Prompts(encode(tokenizer, prompts, spec.chat), length)
    if not len(prefixes):
        few = "at most" if spec.prefix == "prompt" else "at least"
        raise DistillError(
            f"distill.prefix_tokens is {length}, and none of the {len(documents)} training "
            f"documents gives a {spec.prefix} of {few} so many tokens; change it, or the corpus."
        )
    return prefixes


def encode(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], chat: str = "auto"
) -> list[list[int]]:
    """Token ids of whole documents, with the start token where the tokenizer sets one.

    A chat that ends with the user's turn is encoded up to where the answer begins.

    Args:
        chat: `template` renders chats by the tokenizer's chat template, `plain` as `plain_chat`
            does, `auto` by the template where there is one.

    Raises:
        DistillError: there is no template, or it refuses a chat.
    """
    if chat == "template" and not tokenizer.chat_template:
        raise DistillError(
            "distill.chat is template, but the tokenizer has none; set it to plain or auto."
        )
    by_template = chat != "plain" and bool(tokenizer.chat_template)
    chats = [by_template and bool(document.messages) for document in documents]
    rows: list[list[int]] = [[] for _ in documents]
    for templated in (False, True):
        mine = [i for i, is_chat in enumerate(chats) if is_chat == templated]
        texts = [
            _apply_template(tokenizer, documents[i]) if templated else documents[i].whole()
            for i in mine
        ]
        if texts:  # a template writes the special tokens itself
            ids = tokenizer(texts, add_special_tokens=not templated, verbose=False)["input_ids"]
            for i, row in zip(mine, ids, strict=True):
                rows[i] = row
    return rows


def _apply_template(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    assert document.messages
    due = document.messages[-1]["role"] == "user"
    try:
        return render_chat(tokenizer, document.messages, answer=due)
    except ChatTemplateError as error:
        raise DistillError(
            f"{document.id}: {error}; drop the row, or set distill.chat=plain."
        ) from None
