"""Compares greedy text with that of `generate`, token by token, on a user's own models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads.artifacts.plan import dtype_name

from ..speculator import Speculator
from .progress import with_progress

COPIES = 4  # rows of the batch that plain decoding is repeated in
_FAR = 5  # times the noise: more than rounding sets two runs apart


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from that of `generate`, and how near a tie that was.

    The noise is the largest difference of any logit between plain decoding of this prompt and the
    same in other shapes: in a batch of copies, and as one forward over the whole text. It is at
    least one rounding of the largest logit, since a short text may come out alike in all of them.
    """

    prompt: int  # its number
    place: int  # new tokens before it
    margin: float  # the best logit less the second best, in the plain run; infinite past its end
    difference: float  # the largest of any logit there, between the two runs
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether the noise of plain decoding itself can change which token is best.

        Each of the two best logits may be off by it. Where the two runs differ by far more, that is
        no rounding, however near the tie is: honest runs were at most 1.5 times the noise apart.
        """
        return self.margin <= 2 * self.noise and self.difference <= _FAR * self.noise


@dataclass(frozen=True)
class Greedy:
    """Greedy text compared with that of `generate`.

    Plain decoding is compared with itself, in other shapes, only where a text differs.
    """

    prompts: int
    tokens: int  # compared, up to the first difference of each prompt
    divergences: list[Divergence]  # one for each prompt whose text differs
    plain_divergences: int | None  # prompts whose plain text differs in another shape, if tried
    plain_tokens: int  # compared for that
    dtype: str  # the target's
    tree: str  # that was decoded with

    @property
    def holds(self) -> bool:
        """Whether every difference is a near-tie, as plain decoding has them as well."""
        return all(divergence.near_tie for divergence in self.divergences)


def compare_greedy(
    speculator: Speculator, prompts: Sequence[Tensor], new_tokens: int, progress: bool = False
) -> Greedy:
    """Compare greedy text with that of `generate`, prompt [1, P] by prompt."""
    model: Any = speculator.model
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    compared, places = 0, {}
    shown = partial(with_progress, prompts, unit="prompt", disable=not progress)
    for number, ids in enumerate(shown(desc="greedy text")):
        plain, drafted = model.generate(ids, **options), speculator.generate(ids, **options)
        same, differs = agreement(plain, drafted, ids)
        compared += same
        if differs:
            places[number] = same
    by = dtype_name(speculator.model), speculator.tree.label
    if not places:
        return Greedy(len(prompts), compared, [], None, 0, *by)

    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain_tokens = plain_differs = 0
    divergences = []
    for number, ids in enumerate(shown(desc="plain text")):
        alone = model.generate(ids, **options)
        same, differs, noise = in_other_shapes(
            model, ids, alone, partial(model.generate, **options)
        )
        plain_tokens, plain_differs = plain_tokens + same, plain_differs + differs
        if number in places:
            place, drafted = places[number], speculator.generate(ids, **options)
            scores = [logits[0] for logits in alone.logits]
            divergences.append(divergence(number, place, alone, drafted, scores, noise))
    return Greedy(len(prompts), compared, divergences, plain_differs, plain_tokens, *by)


def divergence(
    number: int, place: int, alone: Any, drafted: Any, scores: Sequence[Tensor], noise: float
) -> Divergence:
    """Where the outputs of two runs of a prompt, with logits, differ first.

    Args:
        scores: [V] for each token of the run `alone`, whose best is the token; in units of logits.
    """
    margin = difference = math.inf  # where one text ends and the other goes on
    if place < min(len(alone.logits), len(drafted.logits)):
        difference = _largest(alone.logits[place][0], drafted.logits[place][0])
        best, second = scores[place].double().topk(2).values.tolist()
        margin = best - second
    return Divergence(number, place, margin, difference, noise)


@torch.no_grad()
def in_other_shapes(
    model: Any, ids: Tensor, alone: Any, decode: Callable[..., Any]
) -> tuple[int, bool, float]:
    """Plain decoding of a prompt [1, P] in other shapes, compared with its output `alone`: the
    tokens that agree, whether any differs, and the noise (see `Divergence`).

    Args:
        decode: decodes a batch of copies as `alone` was; the output has logits.
    """
    copies = ids.repeat(COPIES, 1)
    wide = decode(copies, attention_mask=torch.ones_like(copies))
    same, differs = agreement(alone.sequences, wide.sequences[:1], ids)
    steps = zip(alone.logits[: same + 1], wide.logits[: same + 1], strict=False)
    noise = max(_largest(one[0], other[0]) for one, other in steps)

    whole = model(alone.sequences, use_cache=False).logits[0, ids.shape[1] - 1 : -1]  # [new, V]
    changed = (whole.argmax(-1) != alone.sequences[0, ids.shape[1] :]).nonzero()
    if len(changed):
        same, differs = min(same, int(changed[0])), True
    logits = torch.cat(alone.logits)  # [new, V], in float32 where `generate` widens them
    rounding = torch.finfo(model.dtype).eps * float(logits[logits.isfinite()].abs().max())
    return same, differs, max(noise, _largest(logits, whole), rounding)


def agreement(one: Tensor, other: Tensor, prompt: Tensor) -> tuple[int, bool]:
    """New tokens that two texts [1, P + new] share before they differ, and whether they do."""
    first, second = (text[0, prompt.shape[1] :].tolist() for text in (one, other))
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place, True
    return min(len(first), len(second)), len(first) != len(second)


def _largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors of logits [.., V], where both are finite."""
    difference = (one.float() - other.float()).abs()
    return float(difference[difference.isfinite()].max())
