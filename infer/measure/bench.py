"""Measures a speculator against plain decoding in the same runtime and `generate` of transformers.

Every figure is a median over runs that took turns (see `matrix`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headstart.heads.artifacts.plan import dtype_name
from headstart.heads.core import processes_of

from ..rules.registry import choose_rule
from ..speculator import Speculator
from ..trees.static import StaticTree
from .matrix import PLAIN, Answer, Cell, Chat, Settings, measure_cell
from .noise import compare
from .round_parts import RoundParts

SHOWN = 3  # texts kept to be looked at
SHOWN_BEFORE = 32  # tokens of the prompt that are kept with each


def bench(
    speculator: Speculator,
    prompts: Sequence[Tensor],
    new_tokens: int = 128,
    *,
    repeats: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
    generate: bool = True,
) -> dict[str, Any]:
    """Decode every prompt with the speculator and plain decoding in turn, one prompt at a time.

    Args:
        prompts: token ids, each [P] or [1, P].
        repeats: how often each prompt is decoded in each way, once all have been warmed up.
        temperature: 0 decodes greedily; otherwise text is sampled with a seed per prompt.
        generate: whether `generate` of transformers is measured, too.

    Returns:
        The report of `way_report`.

    Raises:
        OptionError: no prompt, or fewer than two new tokens.
    """
    rows = [prompt.flatten().to(speculator.device) for prompt in prompts]
    chats = [Chat(str(i), "", 1, lambda _, row=row: row) for i, row in enumerate(rows)]
    settings = Settings(new_tokens, repeats, seed, {"generate": {}} if generate else {})
    ours = {"speculator": speculator}
    cell = measure_cell(speculator.model, ours, chats, settings, temperature)
    return way_report(cell, "speculator", speculator, chats)


def way_report(
    cell: Cell, name: str, speculator: Speculator, chats: Sequence[Chat]
) -> dict[str, Any]:
    """What one way did in a cell, as plain data.

    Returns:
        `tau`, `tau_by_prompt`, `acceptance_by_depth`, `identical_to_plain` (None where the rule
        draws otherwise), `identical_to_generate` (None when sampling: generate draws from another
        generator), `speedup_vs_NAME` for plain decoding and each of transformers' own ways (of
        `Ratio`; min and max are the extreme prompts), milliseconds per token of each,
        `ms_per_round` (of all rows of a batch), `loop_overhead_ms` (a round minus its forwards
        replayed alone; NaN where `round_parts` has none), `round_parts_ms` (see `RoundParts`), the
        settings (`forwards`: by what those of ours run, plain decoding's too, see `Target`),
        `distinct_4grams` of the text, `by_prompt`, `samples` with the prompt's last tokens, ids and
        rounds (see `Answer`), `tree_paths` of a static tree, and `by_category` where there are
        categories.
    """
    ours, sampled = cell.found[name], cell.temperature > 0
    tree = speculator.tree_of(cell.batch_size, cell.temperature)
    rule = choose_rule(speculator.rule, sampled)
    parts = RoundParts.middle(ours.parts)
    answers: list[list[Answer]] = [[] for _ in chats]
    for answer in ours.answers:
        answers[answer.chat].append(answer)
    texts = [answer.ids for answer in ours.answers]

    def identical(other: str) -> bool:
        return [answer.ids for answer in cell.found[other].answers] == texts

    report: dict[str, Any] = {
        "tau": ours.stats.tau,
        "tau_by_prompt": [tau_of_answers(each) for each in answers],
        "acceptance_by_depth": ours.stats.acceptance_by_depth,
        "identical_to_plain": identical(PLAIN) if rule.same_text else None,
        "identical_to_generate": None,
    }
    if not sampled and "generate" in cell.found:
        report["identical_to_generate"] = identical("generate")
    for other in cell.baselines:
        theirs = cell.found[other].per_token
        report |= _speedup(other, theirs, ours.per_token)
        report[f"{other}_ms_per_token"] = _middle(theirs)
    report |= {
        "ms_per_round": _middle(_per_round(cell, name)),
        "ms_per_token": _middle(ours.per_token),
        "slowest_over_fastest_repeat": median(ours.spread),
        "loop_overhead_ms": parts.get("loop", math.nan),
        "round_parts_ms": parts,
        "prefill_ms": median(ours.prefill_ms),
        "nodes": tree.nodes,
        "tree": str(tree),
        "tree_label": tree.label,
        "rule": rule.name,
        "expansion": speculator.expansion if rule.samples else rule.children,
        "exact": rule.exact,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "dtype": dtype_name(speculator.model),
        "forwards": speculator.target.forwards,
        "device": speculator.device.type,
        "prompts": len(chats),
        "answers": len(texts),
        "tokens": sum(map(len, texts)),
        "distinct_4grams": distinct_4grams(texts),
        "threads": torch.get_num_threads(),
        "processes": processes_of(speculator.model),
        "by_prompt": _by_prompt(cell, name, chats, answers),
        "samples": _samples(chats, answers),
    }
    if isinstance(tree, StaticTree):
        report["tree_paths"] = [list(path) for path in tree.paths]
    if any(chat.category for chat in chats):
        report["by_category"] = _by_category(cell, name, chats, answers)
    return report


def tau_of_answers(answers: Sequence[Answer]) -> float | None:
    """Tokens per round; None where there was no round."""
    counts = [count for answer in answers for count, _ in answer.rounds]
    return sum(counts) / len(counts) if counts else None


def distinct_4grams(texts: Sequence[Sequence[int]]) -> float:
    """The share of 4-grams that no earlier one equals; NaN without any.

    >>> distinct_4grams([[1, 2, 1, 2, 1, 2]])
    0.6666666666666666
    """
    grams = [tuple(text[i : i + 4]) for text in texts for i in range(len(text) - 3)]
    return len(set(grams)) / len(grams) if grams else math.nan


def _middle(values: Sequence[float]) -> float:
    """The median of those that are not NaN; NaN where all are."""
    return median([each for each in values if not math.isnan(each)] or [math.nan])


def _speedup(other: str, slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """`speedup_vs_NAME`, of milliseconds per token; empty where there is nothing to compare."""
    if (found := compare(slow, fast)) is None:
        return {}
    named = asdict(found) | {"within_noise": found.within_noise}
    named |= {"min": named.pop("least"), "max": named.pop("most")}
    return {f"speedup_vs_{other}": named}


def _per_round(cell: Cell, name: str) -> list[float]:
    """Milliseconds of a round of the loop, for each batch: it runs until its last row has ended.

    NaN for a batch without a round.
    """
    rounds: dict[tuple[int, int], int] = {}
    for answer in cell.found[name].answers:
        place = answer.chat, answer.turn
        rounds[place] = len(answer.rounds)
    found = []
    for (ms, _), batch in zip(cell.found[name].times, cell.batches, strict=True):
        turns = {turn for chat, turn in rounds if chat == batch[0]}
        loops = sum(max(rounds[chat, turn] for chat in batch) for turn in turns)
        found.append(ms / loops if loops else math.nan)
    return found


def _by_prompt(
    cell: Cell, name: str, chats: Sequence[Chat], answers: Sequence[Sequence[Answer]]
) -> list[dict[str, Any]]:
    """Each chat's id, category, τ, tokens and, where it was decoded alone, speedup."""
    found = [
        {
            "id": chat.id, "category": chat.category, "tau": tau_of_answers(own),
            "tokens": sum(len(answer.ids) for answer in own),
        }
        for chat, own in zip(chats, answers, strict=True)
    ]  # fmt: skip
    plain, ours = cell.found[PLAIN].per_token, cell.found[name].per_token
    for batch, slow, fast in zip(cell.batches, plain, ours, strict=True):
        if len(batch) == 1 and not math.isnan(slow + fast):
            found[batch[0]]["speedup_vs_plain"] = slow / fast
    return found


def _samples(chats: Sequence[Chat], answers: Sequence[Sequence[Answer]]) -> list[dict[str, Any]]:
    """The first answers that repeat themselves least, of different categories where there are some.

    A text that repeats itself shows little; what all of them do is told by `distinct_4grams`.
    """
    varied = [distinct_4grams([each[0].ids]) if each else math.nan for each in answers]
    order = sorted(
        range(len(chats)), key=lambda i: (-varied[i] if varied[i] == varied[i] else 0, i)
    )
    firsts = {chats[i].category: i for i in reversed(order)}
    several = len(firsts) > 1
    kept = sorted(firsts.values(), key=order.index)[:SHOWN] if several else order[:SHOWN]
    return [
        {
            "id": chats[number].id, "category": chats[number].category,
            "prompt": chats[number].prompt([])[-SHOWN_BEFORE:].tolist(),
            "ids": answers[number][0].ids, "rounds": answers[number][0].rounds,
        }
        for number in kept
    ]  # fmt: skip


def _by_category(
    cell: Cell, name: str, chats: Sequence[Chat], answers: Sequence[Sequence[Answer]]
) -> dict[str, dict[str, Any]]:
    """τ, distinct 4-grams and speedups of the chats of each category."""
    found: dict[str, dict[str, Any]] = {}
    for category in sorted({chat.category for chat in chats}):
        own = [each for chat, each in zip(chats, answers, strict=True) if chat.category == category]
        flat = [answer for each in own for answer in each]
        # Chats that are decoded together are of one category.
        places = [i for i, batch in enumerate(cell.batches) if chats[batch[0]].category == category]
        fast = [cell.found[name].per_token[place] for place in places]
        found[category] = {
            "prompts": len(own),
            "tokens": sum(len(answer.ids) for answer in flat),
            "tau": tau_of_answers(flat),
            "distinct_4grams": distinct_4grams([answer.ids for answer in flat]),
        }
        for other in cell.baselines:
            theirs = [cell.found[other].per_token[place] for place in places]
            found[category] |= _speedup(other, theirs, fast)
    return found
