"""The target's own greedy text, with the features that a drafter reads of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Written:
    """A prompt and the target's greedy continuation."""

    tokens: Tensor  # [T] int64, the prompt included
    features: Tensor  # [T, F], those of the target that the drafter reads
    prompt: int  # how many of the tokens are the prompt's


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
    found: list[Written] = []
    for start in range(0, len(prompts), BATCH):
        texts = continue_greedily(target, prompts[start : start + BATCH], new_tokens)
        found += with_features(target, tuple(drafter.config.feature_layers), texts)
        tick()
    return found


def continue_greedily(
    target: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int
) -> list[tuple[Tensor, int]]:
    """One batch of prompts with the target's greedy continuation [T], and the prompts' lengths."""
    plain = Speculator(target)
    rows = [prompt.flatten() for prompt in prompts]
    ids, longest = decode_greedily(plain, rows, new_tokens), max(map(len, rows))
    ends = np.broadcast_to(longest + 1 + plain.stats.counts.sum(0), len(rows)).tolist()
    each = zip(ids, rows, ends, strict=True)
    return [(text[longest - len(row) : end], len(row)) for text, row, end in each]


@torch.no_grad()
def with_features(
    target: PreTrainedModel, layers: Sequence[int], texts: Sequence[tuple[Tensor, int]]
) -> list[Written]:
    """One batch of texts with the features of some layers, see `capture`."""
    rows = [text for text, _ in texts]
    features = capture(target, layers, pad_sequence(rows, batch_first=True))  # [B, T, F]
    each = zip(texts, features, strict=True)
    return [Written(text, f[: len(text)].clone(), prompt) for (text, prompt), f in each]


def decode_greedily(speculator: Speculator, prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Decode a batch of prompts [P]: [B, the longest P + new] int64, padded on the left."""
    device = speculator.device
    ids, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        for rows in (list(prompts), [torch.ones_like(prompt) for prompt in prompts])
    )
    return speculator.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
