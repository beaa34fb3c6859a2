"""Several speculators and transformers' own ways, measured in one run on the same chats.

All ways decode each turn in turns of their own (see `timing`), after a warm-up. The prompt of a
chat's next turn holds the target's own answer, as plain decoding wrote it, so that every way is
given the same prompts.

Drafters that remember answers begin with none, and are given each turn's once all ways have decoded
it, so that no way drafts from the answer that it is about to write.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import Drafter, OptionError
from headstart.heads.core import counted, end_tokens

from ..speculator import Speculator
from ..stats import Stats
from .baselines import Timed, TimedDecode, timed_generate, timed_speculator
from .noise import compare
from .progress import with_progress
from .round_parts import REPLAYED_PROMPTS, RoundParts, round_parts
from .timing import take_turns

PLAIN = "plain"
"""The name of plain decoding in our own runtime, which is always measured."""

ONE_ROW = ("assistant", "lookup")
"""Ways of `generate` that take one prompt at a time."""

LOOKUP_TOKENS = 10
"""What `prompt_lookup_num_tokens` is, the number in transformers' own documentation."""


@dataclass(frozen=True)
class Chat:
    """What a user asks, turn by turn; a prompt is a chat of one turn.

    Attributes:
        prompt: the token ids [P] of the next turn's prompt, given the answers so far.
    """

    id: str
    category: str
    turns: int
    prompt: Callable[[Sequence[list[int]]], Tensor]


@dataclass(frozen=True)
class Settings:
    """How chats are decoded and timed.

    Attributes:
        against: transformers' own ways by name, each with its arguments of `generate`.
    """

    new_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    against: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One turn of one chat, decoded in one way.

    Attributes:
        ids: the new tokens, an end token included.
        rounds: of each round, how many tokens it emitted, and how many nodes its accepted path has,
            the root counted. The prefill gave the first token. Empty for `generate`.
    """

    chat: int
    turn: int
    ids: list[int]
    rounds: list[tuple[int, int]]


@dataclass
class Decoded:
    """What one way did with all chats.

    Attributes:
        times: for each batch of chats, milliseconds after the first tokens, and the tokens.
        spread: of each batch, the slowest repeat over the fastest.
        stats: of our own loop, all rounds.
        parts: of the first chats, where their rounds' time went.
    """

    answers: list[Answer] = field(default_factory=list)
    times: list[tuple[float, int]] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    parts: list[RoundParts] = field(default_factory=list)

    @property
    def per_token(self) -> list[float]:
        """Milliseconds a token of each batch of chats; NaN where the first tokens were the last."""
        return [ms / tokens if tokens else math.nan for ms, tokens in self.times]


@dataclass(frozen=True)
class Cell:
    """All ways at one temperature and batch size.

    Attributes:
        batches: the chats, by number, that were decoded together.
        found: by the way's name; `PLAIN` is the first.
        baselines: plain decoding and transformers' own ways, as far as they were measured.
    """

    temperature: float
    batch_size: int
    batches: list[list[int]]
    found: dict[str, Decoded]
    baselines: list[str]


def measure_cell(
    model: PreTrainedModel,
    speculators: Mapping[str, Speculator],
    chats: Sequence[Chat],
    settings: Settings,
    temperature: float = 0.0,
    batch_size: int = 1,
) -> Cell:
    """Decode all chats in every way, in turns. What drafters remembered before is forgotten.

    Args:
        speculators: over `model`, by names other than `PLAIN` and those of `settings.against`.

    Raises:
        OptionError: no chat, fewer than two new tokens, or no repeat; or no chat in which plain
            decoding and a speculator both write more than the first tokens.
    """
    if not chats or settings.new_tokens < 2 or settings.repeats < 1:
        raise OptionError(
            f"found {counted(len(chats), 'prompt')}, {counted(settings.new_tokens, 'new token')} "
            f"and {counted(settings.repeats, 'repeat')}; a measurement needs at least 1, 2 and 1."
        )
    decoders = _decoders(model, speculators, settings, temperature, batch_size)
    found = {name: Decoded() for name in decoders}
    for name, speculator in speculators.items():
        found[name].stats = Stats(speculator.tree_of(batch_size, temperature).max_depth)
    remembering = _remembering(speculators.values())
    for drafter in remembering:
        drafter.forget()
    batches = list(_batches(chats, batch_size))
    title = f"bench, temperature {temperature:g}"
    for number, batch in enumerate(with_progress(batches, title, "batch")):
        own = [chats[i] for i in batch]
        decode = functools.partial(_decode_turn, decoders, seeds=[settings.seed + i for i in batch])
        if number == 0:  # warms up
            decode([chat.prompt([]) for chat in own], repeats=1)
        times: dict[str, list[float]] = {name: [] for name in decoders}
        slowest: dict[str, list[float]] = {name: [] for name in decoders}
        tokens = dict.fromkeys(decoders, 0)
        told: list[list[list[int]]] = [[] for _ in batch]
        for turn in range(own[0].turns):
            prompts = [chat.prompt(before) for chat, before in zip(own, told, strict=True)]
            width = max(map(len, prompts))
            for name, runs in decode(prompts, repeats=settings.repeats).items():
                answers = _answers(runs[-1], width, batch, turn, end_tokens(model))
                found[name].answers += answers
                took = [run.decode_ms for run in runs]
                found[name].prefill_ms += [run.prefill_ms for run in runs]
                times[name].append(median(took))
                slowest[name].append(max(took) / max(min(took), 1e-9))
                tokens[name] += sum(len(answer.ids) for answer in answers) - runs[-1].first
                if (stats := runs[-1].stats) is not None:
                    found[name].stats.extend(stats)
                if name == PLAIN:
                    told = [[*b, a.ids] for b, a in zip(told, answers, strict=True)]
            for prompt, answers in zip(prompts, told, strict=True):
                text = torch.cat([prompt.cpu(), torch.tensor(answers[-1])])
                for drafter in remembering:
                    drafter.remember(text, len(prompt))
            if turn == 0 and batch_size == 1 and number < REPLAYED_PROMPTS:
                for name, speculator in speculators.items():
                    again = functools.partial(decoders[name], *_padded(prompts, speculator.device))
                    if (part := round_parts(speculator, again, times[name][-1], 1)) is not None:
                        found[name].parts.append(part)
        for name, of in found.items():
            of.times.append((sum(times[name]), tokens[name]))
            of.spread.append(max(slowest[name]))
    for name in speculators:
        if compare(found[PLAIN].per_token, found[name].per_token) is None:
            raise OptionError(
                "the target ends every text after its first token, so there is no round to "
                "measure; give other prompts."
            )
    baselines = [name for name in (PLAIN, *settings.against) if name in found]
    return Cell(temperature, batch_size, batches, found, baselines)


def _remembering(speculators: Iterable[Speculator]) -> set[Drafter]:
    """The drafters that remember answers; several ways may decode with one of them."""
    every = {each for made in speculators for each in made.decoding_drafters.drafters}
    return {each for each in every if each.remembers}


def _batches(chats: Sequence[Chat], size: int) -> Iterator[list[int]]:
    """Numbers of chats that are decoded together: of one category and as many turns."""

    def kind(number: int) -> tuple[str, int]:
        return chats[number].category, chats[number].turns

    for _, alike in itertools.groupby(sorted(range(len(chats)), key=kind), key=kind):
        numbers = list(alike)
        yield from (numbers[at : at + size] for at in range(0, len(numbers), size))


def _decoders(
    model: PreTrainedModel,
    speculators: Mapping[str, Speculator],
    settings: Settings,
    temperature: float,
    batch_size: int,
) -> dict[str, TimedDecode]:
    options: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        # The rest is the model's own generation config, as where it is decoded with the drafter.
        options |= {"temperature": temperature}
    first = next(iter(speculators.values()), None)
    same = {} if first is None else {
        "graphs": first.graphs is not None, "compile": first.target.compile,
    }  # fmt: skip
    ours = {PLAIN: Speculator(model, **same), **speculators}
    decoders = {name: timed_speculator(each, **options) for name, each in ours.items()}
    pad = min(end_tokens(model), default=0)
    for name, more in settings.against.items():
        if batch_size == 1 or name not in ONE_ROW:
            decoders[name] = timed_generate(model, **options, pad_token_id=pad, **more)
    return decoders


def _decode_turn(
    decoders: Mapping[str, TimedDecode], prompts: Sequence[Tensor], repeats: int, seeds: list[int]
) -> dict[str, list[Timed]]:
    """The same prompts in every way in turns; ours take the seeds, generate torch's generator."""
    ids, mask = _padded(prompts, prompts[0].device)

    def run(decode: TimedDecode, repeat: int) -> Timed:
        torch.manual_seed(seeds[0] + repeat)
        return decode(ids, mask, seeds=seeds)

    calls = {name: functools.partial(run, decode) for name, decode in decoders.items()}
    return take_turns(calls, range(repeats))


def _padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, P] of rows [P], padded on the left."""
    ids, mask = (
        pad_sequence(list(each), batch_first=True, padding_side="left").to(device)
        for each in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


def _answers(
    run: Timed, width: int, batch: Sequence[int], turn: int, ends: set[int]
) -> list[Answer]:
    """The answer of each row, without the padding behind its end token."""
    found = []
    for row, chat in enumerate(batch):
        new = run.text[row, width:].tolist()
        end = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
        rounds = run.stats.rounds_of(row) if run.stats else []
        found.append(Answer(chat, turn, new[:end], rounds))
    return found
