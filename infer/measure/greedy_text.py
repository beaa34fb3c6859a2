"""The target's own greedy text, with the features that a drafter reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import Drafter, OptionError
from headstart.heads.core import capture

from ..speculator import Speculator

BATCH = 32  # texts written, or recorded, at once

Tick = Callable[[], object]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Written:
    """A prompt and the target's greedy continuation.

    Attributes:
        tokens: [T] int64, the prompt included.
        features: [T, F], those of the target that the drafter reads.
        prompt: how many of the tokens are the prompt's.
    """

    tokens: Tensor
    features: Tensor
    prompt: int


@torch.no_grad()
def write_texts(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    new_tokens: int,
    tick: Tick = lambda: None,
) -> list[Written]:
    """Continue each prompt greedily with the target alone, at most to an end token.

    Args:
        prompts: token ids, each [P] or [1, P].
        tick: called after each batch of prompts.

    Raises:
        OptionError: no prompt, or fewer than two new tokens.
    """
    if not prompts or new_tokens < 2:
        raise OptionError(
            f"found {len(prompts)} prompts and {new_tokens} new tokens; recording ranks needs at "
            "least 1 and 2."
        )
    plain = Speculator(target)
    layers = tuple(drafter.config.feature_layers)
    rows: list[Written] = []
    for batch in batches(prompts):
        texts = _continue(plain, [prompt.flatten() for prompt in batch], new_tokens)
        features = capture(target, layers, pad_sequence(texts, batch_first=True))  # [B, T, F]
        each = zip(texts, features, batch, strict=True)
        rows += [Written(t, f[: len(t)].clone(), prompt.numel()) for t, f, prompt in each]
        tick()
    return rows


def decode_greedily(speculator: Speculator, prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Decode a batch of prompts [P]: [B, the longest P + new] int64, padded on the left."""
    device = speculator.device
    ids, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        for rows in (list(prompts), [torch.ones_like(prompt) for prompt in prompts])
    )
    return speculator.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
    )


def batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The items, `BATCH` at a time."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _continue(plain: Speculator, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
    """The prompts [P] with what the target writes after them, each [T]."""
    ids = decode_greedily(plain, prompts, new_tokens)
    longest = max(map(len, prompts))
    written = 1 + plain.stats.counts.sum(0)
    ends = longest + np.broadcast_to(written, len(prompts))
    rows = zip(ids, prompts, ends.tolist(), strict=True)
    return [row[longest - len(prompt) : end] for row, prompt, end in rows]
