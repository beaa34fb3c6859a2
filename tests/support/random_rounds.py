"""Random requests, decoded round by round beside what a fresh prefill would hold."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from headstart.heads import Sampling
from headstart.heads.core import CACHE, row_seeds
from headstart.infer import Decoding
from tests.support.scripted import SHAPES, decoding_of, make, rows_of
from tests.support.tiny import VOCAB, prompts, tiny


class AfterLast(LogitsProcessor):
    """Favours tokens by the last one, so each node needs its own prefix; never reads padding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        favoured = (input_ids[:, -1:] * 7 + torch.tensor([3, 11, 30])) % VOCAB
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 3.0))


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    shape: str
    seeds: tuple[int, ...] | None  # one per row; None is greedy
    warp: int
    new: int
    stop: bool

    def alone(self, row: int) -> "Case":
        seeds = None if self.seeds is None else self.seeds[row : row + 1]
        return replace(self, prompts=self.prompts[row : row + 1], seeds=seeds)

    @property
    def sampling(self) -> Sampling:
        if self.seeds is None:
            return Sampling()
        processors: list[list[Any]] = [
            [TemperatureLogitsWarper(0.7)],
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(12)],
            [AfterLast(), TemperatureLogitsWarper(0.9)],
        ]
        seeds = row_seeds(list(self.seeds), len(self.seeds))
        return Sampling(seeds, LogitsProcessorList(processors[self.warp]))


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 18) for _ in range(draw.randint(1, 5))]
    rows = rows_of(*prompts(lengths, seed))
    return Case(
        draw.choice(["llama", "mistral", "gemma3"]),
        tuple(map(tuple, rows)),
        draw_tree(draw),
        draw.choice(list(SHAPES)),
        tuple(draw.getrandbits(60) for _ in rows) if draw.random() < 0.6 else None,
        draw.randrange(3),
        draw.choice([14, 60, 60]),
        draw.random() < 0.3,
    )


def draw_tree(draw: random.Random) -> tuple[tuple[int, ...], ...]:
    """Up to fourteen nodes, at most four deep and three children wide, no rank left out."""
    children: dict[tuple[int, ...], int] = {(): 0}
    for _ in range(draw.randint(1, 14)):
        parent = draw.choice([p for p in children if len(p) < 4 and children[p] < 3])
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return tuple(path for path in children if path)


def left_padded(case: Case) -> tuple[Tensor, Tensor]:
    width = max(map(len, case.prompts))
    ids = [[0] * (width - len(row)) + list(row) for row in case.prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in case.prompts]
    return torch.tensor(ids), torch.tensor(mask)


class Run:
    """One case being decoded; `texts` grows by what each round says it emitted."""

    def __init__(self, case: Case, script: Tensor, eos: list[int]):
        self.case, self.rounds, self.checked = case, 0, 0
        drafter = make(case.shape, tiny(case.name), script, scale=3.0)
        expansion = "topk" if case.seeds is None else "coupled"
        self.decoding: Decoding = decoding_of(
            tiny(case.name), drafter, case.paths, case.sampling, expansion=expansion, eos=eos
        )
        self.texts = [list(row) for row in case.prompts]
        self.counts: list[list[int]] = [[] for _ in case.prompts]
        self._note(self.decoding.prefill(*left_padded(case), case.new))

    def round(self) -> None:
        self._note(self.decoding.round())
        self.rounds += 1

    def _note(self, emitted: Any) -> None:
        for row, count in enumerate(emitted.count):
            self.texts[row] += emitted.tokens[row, :count].tolist()
            if count:
                self.counts[row].append(int(count))

    def cache_distance(self) -> float:
        """The largest difference to a fresh prefill of each row's text without its root."""
        worst = 0.0
        for row, text in enumerate(self.texts):
            length = len(text) - 1
            assert int(self.decoding.lengths[row]) == length
            if not length:
                continue
            fresh = DynamicCache()
            tiny(self.case.name)(torch.tensor([text[:-1]]), **{CACHE: fresh})
            layers: list[Any] = fresh.layers  # type: ignore[assignment]
            for index, layer in enumerate(layers):
                mine = self.decoding.request.target.cache.layer(index)
                for found, true in zip(mine, (layer.keys, layer.values), strict=True):
                    assert true.shape[2] == length
                    worst = max(worst, float((found[row, :, :length] - true[0]).abs().max()))
        return worst
