"""What a drafter's training saw, for its manifest, and to compare with what decoding sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
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


@torch.no_grad()
def target_loss(target: PreTrainedModel, rows: Rows, count: int = _ROWS) -> dict[str, float]:
    """The target's loss on the supervised tokens of some rows, spread evenly over all.

    Returns:
        `nats` a token, its standard error `se` over rows, and how many `tokens` there were.
    """
    chosen = np.unique(np.linspace(0, len(rows) - 1, count).astype(int)).tolist()
    texts = [rows[number] for number in chosen]
    return mean_loss(
        target, [text["tokens"] for text in texts], [text["supervised"] for text in texts]
    )


@torch.no_grad()
def surprise(
    target: PreTrainedModel, rows: Rows, most: int, temperature: float = 0.0, count: int = _ROWS
) -> dict[str, float]:
    """By how much the first `most` rows surprise a target more than text of its own would.

    That is its loss on the supervised tokens less its own entropy there. For text that it sampled
    at temperature 1 the two are equal on average, and the loss is the smaller one at any lower
    temperature; for higher ones its distribution at that temperature is taken.

    Returns:
        `nats` a token, and its standard error `se` over rows.
    """
    model: Any = target
    device, sums = device_of(target.get_input_embeddings()), []
    for number in np.unique(np.linspace(0, most - 1, count).astype(int)).tolist():
        row = rows[number]
        ids = row["tokens"].to(device).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        chosen = row["supervised"][1:].to(logits.device)
        logs = (logits[chosen].float() / max(temperature, 1.0)).log_softmax(-1)  # [M, V]
        wanted = ids[0, 1:].to(logits.device)[chosen].unsqueeze(-1)
        more = -logs.gather(-1, wanted).squeeze(-1) + (logs.exp() * logs).sum(-1)  # [M]
        sums.append([float(more.sum()), len(more)])
    mean, se = _mean(np.array(sums))
    return {"nats": round(mean, 4), "se": round(se, 4)}


@torch.no_grad()
def mean_loss(
    target: PreTrainedModel, texts: list[Tensor], counted: list[Tensor], batch: int = 8
) -> dict[str, float]:
    """The target's loss on texts [T] at the tokens that are `counted` [T]; see `target_loss`."""
    model: Any = target
    device = device_of(target.get_input_embeddings())
    sums = []
    for first in range(0, len(texts), batch):
        ids = pad_sequence(texts[first : first + batch], batch_first=True).to(device)
        masks = pad_sequence(counted[first : first + batch], batch_first=True).to(device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        wanted, mask = ids[:, 1:].to(logits.device), masks[:, 1:].to(logits.device)
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        losses = losses.view_as(wanted) * mask
        sums += torch.stack([losses.sum(1), mask.sum(1)], 1).tolist()
    each = np.array(sums)
    mean, se = _mean(each)
    return {"nats": round(mean, 4), "se": round(se, 4), "tokens": int(each[:, 1].sum())}


def _mean(each: np.ndarray) -> tuple[float, float]:
    """The mean a token of [n, 2] sums and tokens of rows, and its standard error over rows."""
    total, tokens = each.sum(0)
    mean = total / max(tokens, 1)
    residuals = each[:, 0] - mean * each[:, 1]
    few = len(each) < 2
    se = 0.0 if few else (len(each) / (len(each) - 1) * (residuals**2).sum()) ** 0.5 / tokens
    return float(mean), float(se)
