"""Test on your own models that the output is unchanged.

headstart verify-lossless --drafter runs/my-model/heads --prompts prompts.jsonl
headstart verify-lossless --drafter ORG/NAME --prompts prompts.jsonl --rule rejection
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from headstart.heads.core import counted
from headstart.inputs import load_with_room, read_documents
from headstart.long_prompts import prompts_of
from headstart.terminal import quiet_stdout, tell

from . import options as shared
from .options import temperature

if TYPE_CHECKING:
    from headstart.infer.measure.lossless_greedy import Divergence, Greedy
    from headstart.infer.measure.lossless_sampled import Sampled

_FEW = 0.1  # of the sampled tokens, that were drafted
_EXPLAINED = 5  # divergences described one by one
_DRAWS = "sample N texts, at least 100 (default: 4096)"
_TEMPERATURE = "of the sampled texts (default: 1); 0 tests greedy text alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_model_arguments(parser)
    shared.add_prompt_arguments(parser)
    add("--draws", metavar="N", type=shared.draws, default=4096, help=_DRAWS)
    add("--temperature", metavar="T", type=temperature, default=1.0, help=_TEMPERATURE)
    add("--seed", metavar="S", type=int, default=0, help="of the sampled texts (default: 0)")
    shared.add_json_argument(parser)
    shared.add_drafting_arguments(parser)
    shared.add_loading_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Compare greedy text and sampled text; the status is 1 where one of them does not hold.

    At temperature 0 nothing is sampled.
    """
    documents = read_documents(options)
    options.in_place = False  # the text is compared with that of the target as it is
    speculator = load_with_room(options, options.new_tokens)
    from headstart.infer.measure.lossless_greedy import compare_greedy
    from headstart.infer.measure.lossless_sampled import compare_sampled
    from headstart.reports.tables import to_json

    limit, new_tokens = options.prefix_tokens, options.new_tokens
    prompts, notes = prompts_of(documents, speculator, limit, new_tokens)
    tell(notes)
    prompts = [ids.to(speculator.device) for ids in prompts]
    with quiet_stdout():
        greedy = compare_greedy(speculator, prompts, options.new_tokens, progress=True)
        sampling = {"temperature": options.temperature, "seed": options.seed}
        sampled = options.temperature and compare_sampled(
            speculator, prompts, options.new_tokens, options.draws, progress=True, **sampling
        )
    found = {"greedy": greedy} | ({"sampled": sampled} if sampled else {})
    if options.json:
        print(to_json({k: {**dataclasses.asdict(v), "holds": v.holds} for k, v in found.items()}))
    else:
        _print(greedy, sampled or None, speculator.target.forwards)
    return 0 if all(each.holds for each in found.values()) else 1


def _print(greedy: Greedy, sampled: Sampled | None, forwards: str) -> None:
    from rich.padding import Padding

    from headstart.reports.tables import plain_console, said_of_forwards

    console, by = plain_console(sys.stdout), said_of_forwards(forwards)
    tests = [(greedy.holds, f"Greedy text, tree {greedy.tree}", _greedy_sentences(greedy))]
    if sampled is not None:
        title = f"Sampled text, tree {sampled.tree}, rule {sampled.rule}"
        tests.append((sampled.holds, title, _sampled_sentences(sampled)))
    for holds, title, said in tests:
        answer, style = ("holds", "green") if holds else ("DIFFERS", "red")
        console.print()
        console.print(f"{title}{by}: {answer}", style=style)
        for sentence in said:
            console.print(Padding(sentence, (0, 0, 0, 2)))


def _greedy_sentences(greedy: Greedy) -> list[str]:
    """What the comparison with `generate` showed."""
    apart = greedy.divergences
    if not apart:
        return [
            f"All of {counted(greedy.tokens, 'token')} after {counted(greedy.prompts, 'prompt')} "
            f"are those of generate, in {greedy.dtype}."
        ]
    near = sum(divergence.near_tie for divergence in apart)
    more = len(apart) - _EXPLAINED
    return [
        f"{len(apart)} of {counted(greedy.prompts, 'text')} differ from generate's, in "
        f"{greedy.dtype}; {counted(greedy.tokens, 'token')} before that are the same. {near} of "
        "them differ at a near-tie, where the margin is at most twice what plain decoding differs "
        "from itself in another shape, and no logit of the two runs differs by five times that.",
        *map(_explained, apart[:_EXPLAINED]),
        *([f"… and {more} more."] if more > 0 else []),
        f"Plain decoding leaves its own text in {greedy.plain_divergences} of {greedy.prompts} "
        f"prompts in a batch of copies or as one forward ({greedy.plain_tokens:,} tokens agree): "
        f"{_rate(greedy.plain_divergences or 0, greedy.plain_tokens)} against "
        f"{_rate(len(apart), greedy.tokens)} here.",
    ]


def _sampled_sentences(sampled: Sampled) -> list[str]:
    """What the test of sampling showed."""
    said = []
    if sampled.approximate:
        said.append(
            f"The rule {sampled.rule} is approximate by design: it keeps likely text, not the "
            "target's distribution."
        )
    apart = sampled.seeded_divergences
    if sampled.seeded_tokens:
        said.append(
            f"Against plain decoding with the same seeds {counted(len(apart), 'text')} "
            f"{'differs' if len(apart) == 1 else 'differ'}; "
            f"{counted(sampled.seeded_tokens, 'token')} before that are the same."
            if apart else
            f"All of {counted(sampled.seeded_tokens, 'token')} are those of plain decoding with "
            "the same seeds."
        )  # fmt: skip
    said += [*map(_explained, apart[:_EXPLAINED])]
    said += [f"… and {more} more."] if (more := len(apart) - _EXPLAINED) > 0 else []
    agrees = "agrees with" if sampled.p_value >= sampled.level else "is not"
    if sampled.tokens:
        uniform = "agree with" if sampled.tokens_p_value >= sampled.level else "are not"
        said.append(
            f"{sampled.tokens:,} tokens of longer texts, of all prompts, {uniform} the target's "
            f"distribution, each judged by what stands before it: p = {sampled.tokens_p_value:.2g}."
        )
    every = sampled.draws * sampled.places + sampled.tokens
    few = (
        "; so few show little of the rule: sample at a lower --temperature, or more --draws"
        if sampled.drafted < _FEW * every
        else ""
    )
    return [
        *said,
        f"Over {sampled.draws:,} texts of one prompt the joint distribution of the first "
        f"{sampled.places} tokens {agrees} the target's: p = {sampled.p_value:.2g}, by an exact "
        f"test over {counted(sampled.bins, 'bin')}.",
        f"The total variation over these bins was {sampled.distance:.3f}, and is at most "
        f"{sampled.bound:.3f} with all but one chance in a million. More draws bound it more "
        "tightly.",
        f"Of all these tokens {sampled.drafted / every:.0%} had been drafted{few}.",
    ]


def _explained(divergence: Divergence) -> str:
    kind = "near-tie" if divergence.near_tie else "NOT a near-tie"
    return (
        f"prompt {divergence.prompt}, new token {divergence.place}: the two best tokens are "
        f"{divergence.margin:.3g} apart, the two runs {divergence.difference:.3g}, plain runs up "
        f"to {divergence.noise:.3g}: {kind}."
    )


def _rate(apart: int, tokens: int) -> str:
    return f"{100_000 * apart / max(tokens, 1):.0f} in 100,000 tokens"
