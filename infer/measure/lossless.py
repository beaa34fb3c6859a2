"""Shows on a user's own models that speculative decoding writes what the target would have written.

Greedy text is compared with `generate` token by token. Sampled text is compared with seeded plain
decoding where the rule promises the very same text, and by its joint distribution otherwise.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from headstart.heads import OptionError
from headstart.heads.artifacts.plan import dtype_name

from ..rules.registry import choose_rule
from ..speculator import Speculator

ALPHA = 1e-6
"""A true sampler is called biased with at most this probability."""

_COPIES = 4  # rows of the other batch shape
_WIDTHS = (6, 4, 3)  # likeliest continuations that get a bin of their own, by place
_EXPECTED = 5.0  # draws that a bin must expect at least, as chi-square wants it


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from `generate`'s, and how near a tie that was.

    Attributes:
        prompt: its number; place: new tokens before it.
        margin: the best logit less the second best, in `generate`'s run.
        difference: the largest difference of any logit there, between the two runs.
        noise: the largest difference of any logit between plain decoding of this prompt and the
            same in other shapes: in a batch of copies, and as one forward over the whole text.
    """

    prompt: int
    place: int
    margin: float
    difference: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether the noise of plain decoding itself is enough to turn the choice."""
        return self.margin <= 2 * self.noise


@dataclass(frozen=True)
class Greedy:
    """Greedy text against `generate`'s.

    Attributes:
        prompts: how many; tokens: compared, up to the first difference of each prompt.
        divergences: one for each prompt whose text differs.
        plain_divergences: prompts whose plain text differs in another shape; None where that was
            not asked, as nothing differed.
        plain_tokens: compared for that.
        dtype: the target's.
    """

    prompts: int
    tokens: int
    divergences: list[Divergence]
    plain_divergences: int | None
    plain_tokens: int
    dtype: str

    @property
    def holds(self) -> bool:
        """No difference; below float32, and near it, near-ties that plain decoding has as well."""
        return all(divergence.near_tie for divergence in self.divergences)


@dataclass(frozen=True)
class Sampled:
    """Sampled text against the target's distribution.

    Attributes:
        rule: and expansion, what was tested; approximate: whether the rule says so of itself.
        draws: texts sampled from one prompt; places: tokens of each that were looked at.
        bins: continuations told apart; statistic: chi-square with bins - 1 degrees of freedom.
        p_value: of a true sampler's statistic being as large.
        distance: total variation over the bins, observed.
        bound: with probability 1 - ALPHA the true one is not larger.
        dtype: the target's.
        seeded_tokens: tokens compared with seeded plain decoding; 0 where the rule does not promise
            the same text; seeded_differences: prompts whose text differed.
    """

    rule: str
    expansion: str
    approximate: bool
    draws: int
    places: int
    bins: int
    statistic: float
    p_value: float
    distance: float
    bound: float
    dtype: str
    seeded_tokens: int
    seeded_differences: int

    @property
    def agrees(self) -> bool:
        """Whether the distribution is the target's, as far as the test can see."""
        return self.p_value >= ALPHA

    @property
    def holds(self) -> bool:
        """Whether the test found no difference; below float32 rounding may turn seeded choices."""
        precise = self.dtype in ("float32", "float64")
        return self.agrees and not (precise and self.seeded_differences)


def compare_greedy(
    speculator: Speculator, prompts: Sequence[Tensor], new_tokens: int, progress: bool = False
) -> Greedy:
    """Compare greedy text with that of `generate`, prompt by prompt.

    Args:
        prompts: token ids, each [1, P].
    """
    model: Any = speculator.model
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    compared, apart = 0, []
    shown = tqdm(prompts, desc="greedy text", unit="prompt", file=sys.stderr, disable=not progress)
    for number, ids in enumerate(shown):
        same, differs = _agreement(
            model.generate(ids, **options), speculator.generate(ids, **options), ids
        )
        compared += same
        if differs:
            apart.append((number, same))
    if not apart:
        return Greedy(len(prompts), compared, [], None, 0, dtype_name(speculator.model))

    plain_tokens = plain_apart = 0
    divergences = []
    known = dict(apart)
    shown = tqdm(prompts, desc="plain", unit="prompt", file=sys.stderr, disable=not progress)
    for number, ids in enumerate(shown):
        logits = {"output_logits": True, "return_dict_in_generate": True}
        alone = model.generate(ids, **options, **logits)
        copies = ids.repeat(_COPIES, 1)
        mask = torch.ones_like(copies)
        wide = model.generate(copies, attention_mask=mask, **options, **logits)
        alike, differs = _agreement(alone.sequences, wide.sequences[:1], ids)
        same = alike
        whole = _whole_text(model, alone.sequences, ids.shape[1])  # [new, V]
        written = alone.sequences[0, ids.shape[1] :]
        turned = (whole.argmax(-1) != written).nonzero()
        if len(turned):
            same, differs = min(same, int(turned[0])), True
        plain_tokens, plain_apart = plain_tokens + same, plain_apart + differs
        if number in known:
            place = known[number]
            ours = speculator.generate(ids, **options, **logits)
            there = alone.logits[place][0].float()
            best = there.topk(2).values
            steps = zip(alone.logits[: alike + 1], wide.logits[: alike + 1], strict=False)
            noise = max(_largest(a[0], b[0]) for a, b in steps)
            noise = max(noise, _largest(torch.cat(alone.logits), whole))
            divergences.append(
                Divergence(
                    number,
                    place,
                    float(best[0] - best[1]),
                    _largest(there, ours.logits[place][0]),
                    noise,
                )
            )
    return Greedy(
        len(prompts), compared, divergences, plain_apart, plain_tokens, dtype_name(speculator.model)
    )


def compare_sampled(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int,
    draws: int = 4096,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = False,
) -> Sampled:
    """Sample the first prompt many times and compare the joint distribution of its first tokens.

    `match` and `coupled` also promise the very text of seeded plain decoding; it is compared for
    every prompt.

    Args:
        prompts: token ids, each [1, P].
        draws: texts to sample.

    Raises:
        OptionError: fewer than 100 draws, or a temperature that does not sample.
    """
    if draws < 100 or not temperature > 0:
        raise OptionError(
            f"found {draws} draws at temperature {temperature}; a test of sampling needs at least "
            "100, and a temperature above 0."
        )
    rule = choose_rule(speculator.rule, sampled=True)
    plain = Speculator(speculator.model)
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0}
    tokens = differences = 0
    if rule.same_text:
        for number, ids in enumerate(prompts):
            given = {**options, "max_new_tokens": new_tokens, "seed": seed + number}
            same, differs = _agreement(
                plain.generate(ids, **given), speculator.generate(ids, **given), ids
            )
            tokens, differences = tokens + same, differences + differs

    expected = continuations(plain, prompts[0], options)
    told_apart = {key[:length] for key in expected for length in range(1, len(key))}
    found: Counter[tuple[int, ...]] = Counter()
    bar = tqdm(total=draws, desc=f"sampling, {rule.name}", file=sys.stderr, disable=not progress)
    for first in range(0, draws, batch_size):
        rows = min(batch_size, draws - first)
        seeds = [(seed << 32) + first + row for row in range(rows)]
        ids = prompts[0].repeat(rows, 1)
        options["attention_mask"] = torch.ones_like(ids)
        text = speculator.generate(ids, **options, max_new_tokens=len(_WIDTHS), seed=seeds)
        for row in text[:, ids.shape[1] :].tolist():
            found[_bin(row, expected, told_apart)] += 1
        bar.update(rows)
    bar.close()
    return Sampled(
        rule.name,
        speculator.expansion,
        not rule.exact,
        draws,
        len(_WIDTHS),
        *_chi_square(found, expected, draws),
        dtype_name(speculator.model),
        tokens,
        differences,
    )


def continuations(
    plain: Speculator, prompt: Tensor, options: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Bins of the first tokens and the target's probability of each; they sum to 1.

    A bin is a text of as many tokens as `_WIDTHS` has, or a shorter one that ends with -1: any
    token but those that have bins of their own.
    """
    bins: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    ends = plain.model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for width in _WIDTHS:
        heads = [prefix for prefix in frontier if not prefix or prefix[-1] not in ends]
        bins |= {prefix: frontier[prefix] for prefix in frontier if prefix not in heads}
        if not heads:
            return bins
        tails = torch.tensor(heads, dtype=torch.long, device=prompt.device).view(len(heads), -1)
        ids = torch.cat([prompt.expand(len(heads), -1), tails], 1)
        wanted = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
        said = plain.generate(ids, attention_mask=torch.ones_like(ids), **options, **wanted)
        likely = said.scores[0].double().softmax(-1)  # [heads, V]
        best, tokens = likely.topk(min(width, likely.shape[1]), dim=-1)
        below = {}
        for prefix, chances, names in zip(heads, best.tolist(), tokens.tolist(), strict=True):
            mass = frontier[prefix]
            below |= {
                (*prefix, name): mass * p for name, p in zip(names, chances, strict=True) if p
            }
            bins[(*prefix, -1)] = mass * max(1 - math.fsum(chances), 0.0)
        frontier = below
    return bins | frontier


def _bin(
    row: Sequence[int], bins: dict[tuple[int, ...], float], told_apart: set[tuple[int, ...]]
) -> tuple[int, ...]:
    """The bin that a text falls into, given all beginnings of bins."""
    text = tuple(row)
    for length in range(1, len(text) + 1):
        if text[:length] in bins:
            return text[:length]
        if text[:length] not in told_apart:
            return (*text[: length - 1], -1)
    raise AssertionError(row)


def _chi_square(
    found: Counter[tuple[int, ...]], bins: dict[tuple[int, ...], float], draws: int
) -> tuple[int, float, float, float, float]:
    """Bins, statistic, p-value, total variation, and its bound (McDiarmid's inequality)."""
    large = [key for key, chance in bins.items() if chance * draws >= _EXPECTED]
    counts = [float(found[key]) for key in large]
    wanted = [bins[key] * draws for key in large]
    counts.append(draws - math.fsum(counts))
    wanted.append(max(draws - math.fsum(wanted), 0.0))
    if wanted[-1] < _EXPECTED:  # too few to stand alone
        counts[-2:], wanted[-2:] = [sum(counts[-2:])], [sum(wanted[-2:])]
    statistic = math.fsum((c - w) ** 2 / w for c, w in zip(counts, wanted, strict=True))
    freedom = max(len(counts) - 1, 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    distance = math.fsum(abs(c - w) for c, w in zip(counts, wanted, strict=True)) / (2 * draws)
    spread = 0.5 * math.sqrt(len(counts) / draws) + math.sqrt(-math.log(ALPHA) / (2 * draws))
    return len(counts), statistic, p_value, distance, min(distance + spread, 1.0)


def _agreement(one: Tensor, other: Tensor, prompt: Tensor) -> tuple[int, bool]:
    """New tokens [1, P + new] that two texts share before they differ, and whether they do."""
    first, second = (text[0, prompt.shape[1] :].tolist() for text in (one, other))
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place, True
    return min(len(first), len(second)), len(first) != len(second)


@torch.no_grad()
def _whole_text(model: Any, text: Tensor, prompt: int) -> Tensor:
    """The logits [new, V] that new tokens of a text [1, P + new] came from, in one forward."""
    return model(text, use_cache=False).logits[0, prompt - 1 : -1]


def _largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two rows of logits [V], where both are finite."""
    difference = (one.float() - other.float()).abs()
    return float(difference[difference.isfinite()].max())
