"""The target's own text, with the features that a drafter reads of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import Drafter, OptionError
from headstart.heads.core import capture, counted

from ..speculator import Speculator

BATCH = 32  # texts written, or recorded, at once

Tick = Callable[[], object]


@dataclass(frozen=True)
class Written:
    """A prompt and the target's continuation."""

    tokens: Tensor  # [T] int64, the prompt included
    features: Tensor  # [T, F], those of the target that the drafter reads; on any device
    prompt: int  # how many of the tokens are the prompt's
    seed: int = 0  # that the continuation was sampled with


@torch.no_grad()
def write_texts(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    new_tokens: int,
    tick: Tick = lambda: None,
    temperature: float = 0.0,
) -> list[Written]:
    """Continue each prompt with the target alone, at most to an end token.

    Args:
        prompts: token ids, each [P] or [1, P].
        tick: called after each batch of prompts.
        temperature: 0 is greedily; else the i-th prompt is sampled with the seed i.

    Raises:
        OptionError: no prompt, or fewer than two new tokens.
    """
    if not prompts or new_tokens < 2:
        raise OptionError(
            f"found {counted(len(prompts), 'prompt')} and {counted(new_tokens, 'new token')}; "
            "recording ranks needs at least 1 and 2."
        )
    found: list[Written] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        texts = continue_texts(target, batch, new_tokens, temperature, start)
        written = with_features(target, tuple(drafter.config.feature_layers), texts)
        found += [replace(each, seed=start + i) for i, each in enumerate(written)]
        tick()
    return found


def continue_texts(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[tuple[Tensor, int]]:
    """One batch of prompts with the target's continuation [T], and the prompts' lengths.

    Args:
        seed: the first prompt's, where they are sampled; each has one more than the one before.
    """
    plain = Speculator(target)
    rows = [prompt.flatten() for prompt in prompts]
    ids = decode_texts(plain, rows, new_tokens, temperature, seed)
    longest = max(map(len, rows))
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


def decode_texts(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Decode a batch of prompts [P]: [B, the longest P + new] int64, padded on the left.

    Args:
        seed: see `continue_texts`.
    """
    device = speculator.device
    ids, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        for rows in (list(prompts), [torch.ones_like(prompt) for prompt in prompts])
    )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        seeds = [seed + i for i in range(len(prompts))]
        sampling = {"do_sample": True, "temperature": temperature, "seed": seeds}
    return speculator.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **sampling)


def processors_of(target: Any, ids: Tensor, **options: Any) -> Any:
    """The logits processors that `generate` of transformers makes for prompts [B, P]."""
    found: list[Any] = []

    def take(model: Any, input_ids: Tensor, logits_processor: Any = None, **_: Any) -> Tensor:
        found.append(logits_processor)
        return input_ids

    mask = torch.ones_like(ids)
    target.generate(ids, attention_mask=mask, max_new_tokens=1, custom_generate=take, **options)
    return found[0]
