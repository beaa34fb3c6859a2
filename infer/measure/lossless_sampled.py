"""Compares the distribution of sampled text with the target's, on a user's own models.

The joint distribution of the first tokens is compared by an exact test. Where the rule promises
the very text of seeded plain decoding, that is compared as well; else whole texts are judged token
by token.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.artifacts.plan import dtype_name
from headstart.heads.core import end_tokens, row_seeds
from headstart.heads.core.noise import add_noise

from ..rules.registry import choose_rule
from ..speculator import Speculator
from ..trees.by_request import USUAL, TreesByRequest
from .lossless_greedy import COPIES, Divergence, agreement, divergence, in_other_shapes
from .lossless_tokens import judge_tokens
from .multinomial import multinomial_p_value
from .progress import progress_bar

ALPHA = 1e-6
"""How often the tests of a sample fail a correct sampler, at most."""

_WIDTHS = (6, 4, 3)  # likeliest continuations that get a bin of their own, by place
_EXPECTED = 5.0  # draws that a bin must expect at least: the test learns little from fewer

Text = tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """Sampled text compared with the target's distribution."""

    rule: str
    expansion: str
    approximate: bool  # what the rule is declared
    draws: int  # texts sampled from one prompt
    places: int  # tokens of each that were compared
    bins: int  # continuations counted apart
    p_value: float  # see `multinomial_p_value`
    distance: float  # total variation over the bins, observed
    bound: float  # with probability 1 - ALPHA the true one is not larger
    tokens: int  # of whole texts, judged one by one; 0 where the text itself is promised
    tokens_p_value: float  # see `judge_tokens`; 1 where none were judged
    dtype: str  # the target's
    seeded_tokens: int  # compared with seeded plain decoding; 0 where its text is not promised
    seeded_divergences: list[Divergence]  # one for each prompt whose text differed from it
    tree: str  # of a single prompt at this temperature, which the draws are decoded with
    drafted: int  # of all sampled tokens that were compared: a wrong rule shows in these alone

    @property
    def agrees(self) -> bool:
        """Whether the distribution is the target's, as far as the test can see."""
        return min(self.p_value, self.tokens_p_value) >= self.level

    @property
    def level(self) -> float:
        """The p-value below which a test fails: `ALPHA`, or of two tests half of it."""
        return ALPHA / 2 if self.tokens else ALPHA

    @property
    def holds(self) -> bool:
        """Whether the test found no difference, but in seeded text at near-ties."""
        return self.agrees and all(each.near_tie for each in self.seeded_divergences)


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
    """Sample the first prompt often and compare the joint distribution of its first tokens.

    For every prompt [1, P], the text of seeded plain decoding is compared where the rule promises
    it; else as many tokens again are sampled and judged by `judge_tokens`.

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
    tokens, apart = 0, list[Divergence]()
    for number, ids in enumerate(prompts if rule.same_text else ()):
        seeded = {**options, "max_new_tokens": new_tokens, "seed": seed + number}
        expected, drafted = (s.generate(ids, **seeded) for s in (plain, speculator))
        same, differs = agreement(expected, drafted, ids)
        tokens += same
        if differs:
            apart.append(_seeded_divergence(speculator, plain, number, ids, same, seeded))

    # So many rows may have another tree than the single prompt that they stand for.
    tree, single = speculator.tree_of(1, temperature), copy.copy(speculator)
    single.trees = TreesByRequest({USUAL: tree})
    places = len(_WIDTHS)
    looked_at, tokens_p_value, drafted = 0, 1.0, 0
    if not rule.same_text:
        looked_at, tokens_p_value, drafted = judge_tokens(
            single, prompts, new_tokens, draws * places, options, seed, progress=progress
        )
    expected = continuations(plain, prompts[0], options)
    found: Counter[Text] = Counter()
    bar = progress_bar(draws, f"sampling, {rule.name}", "draw", disable=not progress)
    for first in range(0, draws, batch_size):
        rows = min(batch_size, draws - first)
        seeds = [(seed << 32) + first + row for row in range(rows)]
        ids = prompts[0].repeat(rows, 1)
        options["attention_mask"] = torch.ones_like(ids)
        text = single.generate(ids, **options, max_new_tokens=places, seed=seeds)
        drafted += single.stats.accepted_tokens
        found.update(_bin(row, expected) for row in text[:, ids.shape[1] :].tolist())
        bar.update(rows)
    bar.close()
    tested = rule.name, speculator.expansion, not rule.exact, draws, places
    test = _judge(found, expected, draws)
    dtype = dtype_name(speculator.model)
    judged = looked_at, tokens_p_value
    return Sampled(*tested, *test, *judged, dtype, tokens, apart, tree.label, drafted)


def _seeded_divergence(
    speculator: Speculator,
    plain: Speculator,
    number: int,
    ids: Tensor,
    place: int,
    seeded: dict[str, Any],
) -> Divergence:
    """How near a tie it was where seeded text differs first: of the scores with their noise."""
    options = seeded | {
        "output_logits": True, "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    alone, drafted = (s.generate(ids, **options) for s in (plain, speculator))
    seeds = row_seeds(seeded["seed"], 1, ids.device)
    noisy = [
        add_noise(scores.unsqueeze(1), seeds, torch.full_like(ids[:, :1], position)).flatten()
        for position, scores in enumerate(alone.scores, ids.shape[1])
    ]  # each [V]
    decode = partial(plain.generate, **options | {"seed": seeds.tolist() * COPIES})
    _, _, noise = in_other_shapes(plain.model, ids, alone, decode)
    # Logits were divided by the temperature.
    scores = [seeded["temperature"] * each for each in noisy]
    return divergence(number, place, alone, drafted, scores, noise)


def continuations(plain: Speculator, prompt: Tensor, options: dict[str, Any]) -> dict[Text, float]:
    """Bins of the first tokens and the target's probability of each; they sum to 1.

    A bin is a text of as many tokens as `_WIDTHS` has, or a shorter one that ends with -1: any
    token but those that have bins of their own.
    """
    bins: dict[Text, float] = {}
    frontier: dict[Text, float] = {(): 1.0}
    ends = end_tokens(plain.model)
    for width in _WIDTHS:
        heads = [prefix for prefix in frontier if not prefix or prefix[-1] not in ends]
        bins |= {prefix: frontier[prefix] for prefix in frontier if prefix not in heads}
        if not heads:
            return bins
        tails = torch.tensor(heads, dtype=torch.long, device=prompt.device).view(len(heads), -1)
        ids = torch.cat([prompt.expand(len(heads), -1), tails], 1)
        wanted = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
        output = plain.generate(ids, attention_mask=torch.ones_like(ids), **options, **wanted)
        likely = output.scores[0].double().softmax(-1)  # [heads, V]
        best, tokens = likely.topk(min(width, likely.shape[1]), dim=-1)
        below = {}
        for prefix, chances, names in zip(heads, best.tolist(), tokens.tolist(), strict=True):
            mass, likeliest = frontier[prefix], zip(names, chances, strict=True)
            below |= {(*prefix, name): mass * p for name, p in likeliest if p}
            bins[(*prefix, -1)] = mass * max(1 - math.fsum(chances), 0.0)
        frontier = below
    return bins | frontier


def _bin(row: Sequence[int], bins: dict[Text, float]) -> Text:
    """The bin of a text: itself or a beginning of it, else the longest one that ends with -1."""
    ends = range(len(row), 0, -1)
    keys = [*(tuple(row[:end]) for end in ends), *((*row[: end - 1], -1) for end in ends)]
    return next(key for key in keys if key in bins)


def _judge(
    found: Counter[Text], bins: dict[Text, float], draws: int
) -> tuple[int, float, float, float]:
    """Bins, p-value, total variation, and its bound (McDiarmid's inequality).

    All that is too rare for a bin of its own is one bin.
    """
    large = [key for key, chance in bins.items() if chance * draws >= _EXPECTED]
    large.sort(key=lambda key: -bins[key])
    counts, chances = [found[key] for key in large], [bins[key] for key in large]
    counts.append(draws - sum(counts))
    chances.append(math.fsum(bins[key] for key in bins.keys() - large))
    pairs = zip(counts, chances, strict=True)
    distance = math.fsum(abs(count / draws - chance) for count, chance in pairs) / 2
    spread = 0.5 * math.sqrt(len(counts) / draws) + math.sqrt(-math.log(ALPHA) / (2 * draws))
    bound = min(distance + spread, 1.0)
    return len(counts), multinomial_p_value(counts, chances), distance, bound
