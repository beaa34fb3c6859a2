"""Judges every token of whole sampled texts, on a user's own models.

The joint distribution of the first tokens (`lossless_sampled`) shows one round of one prompt. This
shows all rounds, at all depths, of all prompts, but each token for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..speculator import Speculator
from .multinomial import multinomial_p_value
from .own_text import processors_of
from .progress import progress_bar

_BINS = 20


def judge_tokens(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int,
    tokens: int,
    options: dict[str, Any],
    seed: int = 0,
    progress: bool = False,
) -> tuple[int, float, int]:
    """Sample texts of all prompts and compare each token with the target's distribution there.

    A token x is replaced by F + u · p(x): F is the mass of the tokens that the target finds
    likelier, p(x) that of x and its equals, and u uniform. If each x is the target's draw, these
    numbers are uniform and independent, whatever the text (Rosenblatt 1952). Behind the end of a
    text stand uniform numbers, so that their count says nothing of the text.

    Args:
        prompts: each [1, P].
        tokens: that are sampled, at least.
        options: of `generate`, which say how text is sampled.

    Returns:
        The tokens judged, the exact p-value of how these numbers spread over equal bins, and how
        many of the tokens were drafted.
    """
    rows = -(-tokens // (new_tokens * len(prompts)))  # of each prompt
    noise = torch.Generator().manual_seed(seed)
    found, judged, drafted = torch.zeros(_BINS, dtype=torch.long), 0, 0
    bar = progress_bar(len(prompts), "tokens of whole texts", "prompt", disable=not progress)
    for number, ids in enumerate(prompts):
        copies = ids.repeat(rows, 1)
        seeds = [((seed + 1 + number) << 32) - 1 - row for row in range(rows)]
        text = speculator.generate(
            copies, attention_mask=torch.ones_like(copies), max_new_tokens=new_tokens, seed=seeds,
            **options,
        )  # fmt: skip
        drafted += speculator.stats.accepted_tokens
        ends = ids.shape[1] + 1 + speculator.stats.counts.sum(0)  # [rows]
        processors = processors_of(speculator.model, ids, **options)
        for row, end in zip(text, ends.tolist(), strict=True):
            uniforms = torch.rand(new_tokens, generator=noise, dtype=torch.float64)
            own = row[:end].unsqueeze(0)
            for place, (above, equal) in enumerate(_masses(speculator.model, processors, ids, own)):
                uniforms[place] = above + uniforms[place] * equal
                judged += 1
            found += torch.bincount((uniforms * _BINS).long().clamp(max=_BINS - 1), minlength=_BINS)
        bar.update(1)
    bar.close()
    return judged, multinomial_p_value(found.tolist(), [1 / _BINS] * _BINS), drafted


@torch.no_grad()
def _masses(
    model: Any, processors: Any, prompt: Tensor, text: Tensor
) -> Iterator[tuple[float, float]]:
    """Of each new token of a text [1, T]: the mass of likelier ones, and of it and its equals."""
    first = prompt.shape[1]
    logits = model(text, use_cache=False).logits[0, first - 1 : -1]  # [new, V]
    for place, given in enumerate(logits, first):
        scores = processors(text[:, :place], given.float().unsqueeze(0))[0]  # [V]
        p, own = scores.double().softmax(-1), scores[text[0, place]]
        yield float(p[scores > own].sum()), float(p[scores == own].sum())
