"""Held-out prompts, which drafters are validated and measured with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..recipe import Chat, Recipe
from .documents import Document
from .prefixes import encode
from .reading import order


class HeldOutError(ValueError):
    """Held-out documents that are too few or too short."""


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt of a held-out document."""

    tokens: Tensor  # [P] int64
    document: str  # its id: prompts of one document are not independent of each other
    source: str = ""  # the name of the corpus source that the document came from


Part = Literal["bench", "validation"]

_TEXTS = 512  # windows that a target's loss is measured on


def prompt_settings(recipe: Recipe, context: int | None = None) -> dict[str, Any]:
    """What the prompts of validation and benchmark are, as `held_out_prompts` takes it.

    `decode.prefix` says it: `same` as what the target continues (`distill.prefix`), where prompts
    are those that distillation would take; or windows of `decode.prefix_tokens` tokens. Whoever
    trains on answers that are not the target's own is measured with prompts. Given rows without
    `distill.max_length` are as long as the target's context, and so are their prompts with the
    answers that are written.

    Args:
        context: of the target; where it is None, prompts that it alone bounds are of any length.
    """
    decode, distill = recipe.decode, recipe.distill
    same = "prompt" if distill.writer != "own" else distill.prefix
    prefix = same if decode.prefix == "same" else "window"
    tokens = decode.prefix_tokens
    if prefix == "prompt":
        tokens = distill.prefix_tokens
        if distill.writer == "given":
            row = distill.max_length or context
            tokens = None if row is None else max(row - decode.new_tokens, 1)
    rendering = asdict(recipe.chat)
    kind = {"prefix": prefix, "tokens": tokens, "chat": distill.chat, "rendering": rendering}
    return kind | ({"decoded": True} if distill.writer == "given" else {})


def recipe_prompts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    part: Part,
    context: int | None,
) -> list[HeldOutPrompt]:
    """The prompts that a recipe's validation or benchmark decodes; see `held_out_prompts`.

    Args:
        context: of the target, see `prompt_settings`.
    """
    decode, kind = recipe.decode, prompt_settings(recipe, context)
    count = decode.prompts if part == "bench" else decode.validation_prompts
    return held_out_prompts(
        tokenizer, documents, count, seed=recipe.seed, part=part, remedy=_remedy(recipe), **kind
    )


def _remedy(recipe: Recipe) -> str:
    """What to do for prompts that are too long, and for documents that are too short."""
    if prompt_settings(recipe)["prefix"] != "prompt":
        return "lower decode.prefix_tokens"
    if recipe.distill.writer != "given":
        return "raise distill.prefix_tokens"
    how = "raise distill.max_length" if recipe.distill.max_length else "lower decode.new_tokens"
    return f"{how}, set decode.prefix=window"


def _more(prefix: str, left_out: int, remedy: str) -> str:
    """What to do for more prompts, where so many are too long or documents too short."""
    what = "prompts are longer" if prefix == "prompt" else "documents are shorter"
    said = f"{left_out} {what}: {remedy}, or " if left_out else ""
    return f"{said}give more documents, raise corpus.held_out or corpus.max_bytes"


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    count: int,
    tokens: int | None,
    seed: int = 0,
    part: Part = "bench",
    prefix: str = "window",
    chat: str = "auto",
    rendering: dict[str, Any] | None = None,
    decoded: bool = False,
    remedy: str = "ask for another length",
) -> list[HeldOutPrompt]:
    """The first `count` prompts of held-out documents, in an order drawn by (seed, documents).

    Every third document, in the order of a hash, is for validation and the others for the
    benchmark, so a checkpoint or tree is not judged by texts that chose it.

    Args:
        tokens: how many a window or start has, and how many a prompt has at most; None for any.
        prefix: `window`, which do not overlap, and which the documents take turns in giving;
            `start`, the first tokens of each document; or `prompt`, all up to an answer, drawn from
            all those of all documents, as distillation draws them.
        chat: see `encode`; rendering: the recipe's section `chat`, as plain data.
        decoded: take the tokens of prompts that were decoded, where documents have them.
        remedy: what the error says to do about prompts that are too long, and about documents that
            are too short.

    Raises:
        HeldOutError: there are fewer.
    """
    settings = Chat(**rendering) if rendering else None
    given, left_out = _by_document(
        tokenizer, documents, tokens, seed, prefix, chat, settings, decoded
    )
    mine = _of_part(given, part)
    prompts = [prompt for found in mine for prompt in found]
    if prefix == "prompt":
        numbered = [(f"{seed}:{p.document}:{len(p.tokens)}", p) for p in prompts]
        prompts = [prompt for key, prompt in sorted(numbered, key=lambda found: order(found[0]))]
    else:
        prompts = _in_turns(mine)
    if len(prompts) < count:
        kind = f"{prefix}s of {'at most ' if prefix == 'prompt' else ''}{tokens} tokens"
        kind = kind if tokens is not None else "prompts"
        raise HeldOutError(
            f"{len(documents)} held-out documents give {len(prompts)} different {kind} for {part}, "
            f"which has {'two thirds' if part == 'bench' else 'a third'} of them, "
            f"expected {count}; {_more(prefix, left_out, remedy)}, or lower "
            f"decode.{'prompts' if part == 'bench' else 'validation_prompts'}."
        )
    return prompts[:count]


def available_prompts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    context: int | None,
) -> tuple[dict[Part, int], str]:
    """How many prompts held-out documents give for each part, and what to do for more.

    See `recipe_prompts`.
    """
    kind = prompt_settings(recipe, context)
    prefix, tokens, chat = kind["prefix"], kind["tokens"], kind["chat"]
    how = prefix, chat, recipe.chat, kind.get("decoded", False)
    given, left_out = _by_document(tokenizer, documents, tokens, recipe.seed, *how)
    parts: tuple[Part, ...] = ("validation", "bench")
    counts: dict[Part, int] = {p: sum(map(len, _of_part(given, p))) for p in parts}
    return counts, _more(prefix, left_out, _remedy(recipe))


def held_out_texts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], tokens: int, seed: int = 0,
    chat: str = "auto", settings: Chat | None = None,
) -> list[Tensor]:  # fmt: skip
    """At most `_TEXTS` windows of `tokens` tokens, [P] int64; see `held_out_prompts`.

    Where all documents are shorter, the windows have half as many tokens, and so on. They are of
    the benchmark's documents; of the only document, where there is no other.
    """
    given: list[list[HeldOutPrompt]] = []
    while not given:
        given, _ = _by_document(tokenizer, documents, tokens, seed, "window", chat, settings)
        tokens //= 2
    windows = _in_turns(_of_part(given, "bench") or given)
    return [window.tokens for window in windows[:_TEXTS]]


def _by_document(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], tokens: int | None,
    seed: int, prefix: str, chat: str, settings: Chat | None = None, decoded: bool = False,
) -> tuple[list[list[HeldOutPrompt]], int]:  # fmt: skip
    """The prompts of each document that gives any, the documents in a drawn order.

    Of equal prompts only the first document's, or one could choose a checkpoint and judge it. And
    how many prompts are longer than `tokens`, or documents shorter.
    """
    documents = sorted(documents, key=lambda document: order(f"{seed}:{document.id}"))
    left_out = 0
    if prefix == "prompt":
        texts = [(at, text) for at, d in enumerate(documents) for text in d.prompts()]
        rows = encode(tokenizer, [text for _, text in texts], chat, settings)
        found: list[list[np.ndarray]] = [[] for _ in documents]
        for (at, text), row in zip(texts, rows, strict=True):
            if text.ids is not None and (decoded or not text.text):
                row = np.array(text.ids[0], np.int32)
            if tokens is not None and len(row) > tokens:
                left_out += 1
            elif len(row):
                found[at].append(row)
    else:
        assert tokens is not None
        rows = encode(tokenizer, documents, chat, settings)
        found = []
        for document, row in zip(documents, rows, strict=True):
            left_out += len(row) < tokens
            starts = range(0, len(row) - tokens + 1, tokens)
            drawn = sorted(starts, key=lambda at: order(f"{seed}:{document.id}:{at}"))
            cut = starts[:1] if prefix == "start" else drawn
            found.append([row[at : at + tokens] for at in cut])
    seen = set[bytes]()
    given = []
    for document, rows in zip(documents, found, strict=True):
        new = {row.tobytes(): row for row in rows if row.tobytes() not in seen}
        seen.update(new)
        if new:
            own = document.id, document.source
            given.append(
                [
                    HeldOutPrompt(torch.from_numpy(row.astype(np.int64)), *own)
                    for row in new.values()
                ]
            )
    return given, left_out


def _of_part(given: list[list[HeldOutPrompt]], part: Part) -> list[list[HeldOutPrompt]]:
    return given[::3] if part == "validation" else [d for i, d in enumerate(given) if i % 3]


def _in_turns(given: list[list[HeldOutPrompt]]) -> list[HeldOutPrompt]:
    """The documents' first prompts, then their second ones, and so on."""
    return [p for turn in itertools.zip_longest(*given) for p in turn if p is not None]
