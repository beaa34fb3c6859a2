"""What a drafter's training saw, for its manifest, and to compare with what decoding sees."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads import Drafter
from headstart.heads.artifacts.conditions import (
    drafter_conditions,
    probe_losses,
    target_conditions,
)
from headstart.heads.core import device_of

from .data.distill import MANIFEST
from .data.documents import Document
from .data.prefixes import chat_renderer
from .data.training_rows import Rows
from .recipe import Recipe

_ROWS = 32  # whose loss under the target is measured
_AT_ONCE = 1 << 27  # logits that the target computes at once
_THINKING = "enable_thinking"


def training_conditions(
    recipe: Recipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    held_out: Sequence[Document],
    distilled: Path,
    runs: bool = True,
) -> dict[str, Any]:
    """What training saw, as JSON.

    Args:
        held_out: some documents of the corpus.
        distilled: the folder of the training rows.
        runs: whether this process can run the target by itself.

    Returns:
        `target` and `drafter`, see `heads.artifacts.conditions`, the target's `probe_losses`
        included where it runs; `chat`, how chats are rendered; and of the rows `rows`, their counts
        and lengths, how many `answers` they hold and of how many the opening is supervised
        (`openings`, see `Counts`), and `data`: sources, writer, and `target_loss`, that of the
        target on what the drafter was taught, in nats a token.
    """
    found = {
        "target": target_conditions(target),
        "drafter": drafter_conditions(drafter),
        "chat": _chat(recipe, tokenizer, held_out),
    }
    if runs:
        found["target"]["probe_losses"] = probe_losses(target)
    rows = Rows.load(distilled)
    written = json.loads((distilled / MANIFEST).read_text(encoding="utf-8"))
    spec = recipe.distill
    found["rows"] = {
        "rows": len(rows),
        "tokens": int(rows.lengths.sum()),
        "supervised": sum(int(info["supervised"]) for info in rows.info),
        "answers": sum(int(info.get("answers", 0)) for info in rows.info),
        "openings": sum(int(info.get("openings", 0)) for info in rows.info),
        "longest": int(rows.lengths.max()),
        "mean": round(float(rows.lengths.mean()), 1),
    }
    found["data"] = {
        "sources": [part.source for part in recipe.corpus.parts()],
        "writer": spec.writer,
        "written_by": written["target_fingerprint"],
        "temperature": None if spec.writer == "given" else spec.temperature,
        "target_loss": target_loss(target, rows) if runs else None,
    }
    return found


def _chat(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[Document]
) -> dict[str, Any]:
    """How the corpus' chats are rendered; `how` is `text` where it holds none.

    `template` is that of the tokenizer, `template_hash` that of the template with its settings;
    `thinking` the template's switch, None where the recipe does not set it.
    """
    if not any(document.messages for document in held_out):
        return {"how": "text"}
    renderer = chat_renderer(tokenizer, recipe.chat, recipe.distill.chat)
    if renderer.plain:
        return {"how": "plain"}
    kwargs = recipe.chat.template_kwargs
    return {
        "how": "template",
        "template": tokenizer.get_chat_template(),
        "template_hash": renderer.template_hash,
        "template_kwargs": kwargs,
        "thinking": kwargs.get(_THINKING),
        "system": recipe.chat.system,
        "date": recipe.chat.date,
    }


def target_loss(target: PreTrainedModel, rows: Rows) -> dict[str, float]:
    """The target's loss on the supervised tokens of some rows, spread evenly over all.

    Returns:
        `nats` a token, its standard error `se` over rows, and how many `tokens` there were.
    """
    return mean_loss(target, *_some(rows, len(rows)))


def mean_loss(
    target: PreTrainedModel, texts: list[Tensor], counted: list[Tensor]
) -> dict[str, float]:
    """The target's loss on texts [T] at the tokens that are `counted` [T]; see `target_loss`."""
    return _mean(target, texts, counted, partial(F.cross_entropy, reduction="none"))


def surprise(
    target: PreTrainedModel, rows: Rows, most: int, temperature: float = 0.0
) -> dict[str, float]:
    """By how much the first `most` rows surprise a target more than text of its own would.

    That is its loss on the supervised tokens less its own entropy there. For text that it sampled
    at temperature 1 the two are equal on average, and the loss is the smaller one at any lower
    temperature; for higher ones its distribution at that temperature is taken.

    Returns:
        See `target_loss`.
    """

    def excess(logits: Tensor, wanted: Tensor) -> Tensor:
        logs = (logits / max(temperature, 1.0)).log_softmax(-1)  # [n, V]
        nats = -logs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)  # [n]
        return nats + (logs.exp() * logs).sum(-1)

    return _mean(target, *_some(rows, most), excess)


def _some(rows: Rows, most: int) -> tuple[list[Tensor], list[Tensor]]:
    """Some of the first `most` rows, evenly spread: their tokens [L], and what is supervised."""
    chosen = np.unique(np.linspace(0, most - 1, _ROWS).astype(int)).tolist()
    texts = [rows[number] for number in chosen]
    return [text["tokens"] for text in texts], [text["supervised"] for text in texts]


@torch.no_grad()
def _mean(
    target: PreTrainedModel,
    texts: list[Tensor],
    counted: list[Tensor],
    nats: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, float]:
    """The mean over counted tokens of what `nats` says, [n], of logits [n, V] and tokens [n]."""
    sums = []
    for text, chosen in zip(texts, counted, strict=True):
        found, count = 0.0, 0
        for logits, wanted in _predictions(target, text, chosen):
            found += float(nats(logits, wanted).sum())
            count += len(wanted)
        sums.append([found, count])
    each = np.array(sums)
    total, tokens = each.sum(0)
    mean = total / max(tokens, 1)
    residuals = each[:, 0] - mean * each[:, 1]
    few = len(each) < 2
    se = 0.0 if few else (len(each) / (len(each) - 1) * (residuals**2).sum()) ** 0.5 / tokens
    return {"nats": round(float(mean), 4), "se": round(float(se), 4), "tokens": int(tokens)}


def _predictions(
    target: PreTrainedModel, text: Tensor, counted: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's logits [n, V] for the counted tokens of a text [T], and these tokens [n].

    Some at a time, each by a forward: all logits of a long text may not fit beside the target.
    """
    model: Any = target
    ids = text.to(device_of(target.get_input_embeddings()))
    before = counted[1:].nonzero().squeeze(1).cpu()  # the layers may be on several devices
    size = max(_AT_ONCE // target.config.get_text_config(decoder=True).vocab_size, 1)
    knows = "logits_to_keep" in inspect.signature(model.forward).parameters
    for part in before.split(size if knows else max(len(before), 1)):
        how = {"logits_to_keep": part} if knows else {}
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False, **how).logits[0]
        logits = logits if len(logits) == len(part) else logits[part]
        yield logits.float(), ids[part + 1].to(logits.device)
