"""Random rounds: the cache is what a fresh prefill would hold, and rows do not know their batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import SlabCache
from headstart.heads.core import masks, noise, parents_of_paths
from headstart.infer import target
from tests.support.random_rounds import Case, Run, draw_case, left_padded
from tests.support.scripted import SHAPES, decoding_of, rows_of
from tests.support.tiny import path_to, prompts, tiny

ROUNDS = 10  # at most, of one case
CASES, PROOF_CASES = range(12), range(100, 225)
SHOWS = 1e-3


@torch.no_grad()
def plain_text(case: Case) -> Tensor:
    """[B, new + 8] a forward a token, longer than the case decodes."""
    decoding = decoding_of(tiny(case.name), None, "plain", case.sampling)
    ids, mask = left_padded(case)
    tokens = [torch.from_numpy(decoding.prefill(ids, mask, case.new + 8).tokens.copy())]
    while not decoding.finished:
        tokens.append(torch.from_numpy(decoding.round().tokens.copy()))
    return torch.cat(tokens, 1)


def watch_positions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward of a tree stands at the rows' ends, each node its own depth further on."""
    true = target.tree_forward

    def checked(model, cache, windows, tokens, lengths, positions, ancestors, live, *rest):
        if model is tiny(run.case.name) and lengths is run.decoding.lengths:
            parents = parents_of_paths(run.case.paths)[0]
            depths = [len(path_to(parents, node)) - 1 for node in range(len(parents))]
            for row, text in enumerate(run.texts):
                assert tokens[row, 0] == text[-1]
                assert positions[row].tolist() == [len(text) - 1 + depth for depth in depths]
            assert live >= max(map(len, run.texts)) - 1 + len(parents)
            run.checked += 1
        return true(model, cache, windows, tokens, lengths, positions, ancestors, live, *rest)

    monkeypatch.setattr(target, "tree_forward", checked)


def ends_of(case: Case, script: Tensor) -> list[int]:
    """A token that some row writes after a few others, so that rows end apart."""
    return [int(script[-1, 5])] if case.stop else []


def until_end(text: list[int], eos: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(text) if token in eos]
    return text[: ends[0] + 1] if ends else text


@torch.no_grad()
def prove(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float, int]:
    """Decode a random case beside its rows alone; rounds, the cache's worst distance, tokens."""
    case = draw_case(seed)
    script = plain_text(case)
    eos = ends_of(case, script)
    with monkeypatch.context() as patch:
        run = Run(case, script, eos)
        watch_positions(run, patch)
        worst = run.cache_distance()
        while not run.decoding.finished and run.rounds < ROUNDS:
            run.round()
            worst = max(worst, run.cache_distance())
        assert run.checked == run.rounds
    for row, text in enumerate(run.texts):
        new = text[len(case.prompts[row]) :]
        assert new == until_end(script[row, : case.new].tolist(), eos)[: len(new)]
        alone = Run(case.alone(row), script[row : row + 1], eos)
        while not alone.decoding.finished and alone.rounds < ROUNDS:
            alone.round()
        assert alone.texts[0] == text
        assert alone.counts[0] == run.counts[row]
    return run.rounds, worst, sum(map(sum, run.counts))


@pytest.mark.parametrize("seed", CASES)
def test_the_cache_is_a_fresh_prefill_and_rows_are_their_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, worst, tokens = prove(seed, monkeypatch)
    assert rounds >= 2 and tokens > rounds
    assert worst <= 1e-10


def test_the_cases_are_varied() -> None:
    """What is drawn by default holds every kind, more than one row, siblings and chains."""
    cases = [draw_case(seed) for seed in CASES]
    assert {case.name for case in cases} == {"llama", "mistral", "gemma3"}
    assert {case.shape for case in cases} == set(SHAPES)
    assert {case.seeds is None for case in cases} == {True, False}
    assert {case.warp for case in cases if case.seeds} == {0, 1, 2}
    assert {case.stop for case in cases} == {True, False}
    assert len({len(case.prompts) for case in cases}) > 2
    assert any(any(path[-1] for path in case.paths) for case in cases)


@pytest.mark.proof
def test_a_thousand_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [prove(seed, monkeypatch) for seed in PROOF_CASES]
    rounds, worst = sum(r[0] for r in results), max(r[1] for r in results)
    with capsys.disabled():
        tokens = sum(r[2] for r in results)
        print(f"\n{len(results)} cases, {rounds} rounds, {tokens} tokens: cache off by {worst:.1e}")
    assert rounds >= 1000
    assert worst <= 1e-10


def several_rows() -> tuple[Case, Tensor]:
    """A sampled case of three rows with siblings, and its plain text."""
    case = replace(
        draw_case(0),
        prompts=tuple(map(tuple, rows_of(*prompts([4, 11, 7])))),
        paths=((0,), (1,), (2,), (0, 0), (1, 0)),
        shape="heads",
        seeds=(5, 6, 7),
        warp=0,
        new=60,
        stop=False,
    )
    return case, plain_text(case)


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["nothing", "one row", "shifted"])
def test_a_wrong_commit_shows(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = SlabCache.commit

    def commit(self: SlabCache, path: Tensor, *rest: bool) -> None:
        path = path.clone()
        if wrong == "one row":
            path[1] = torch.arange(path.shape[1])
        elif wrong == "shifted":
            path = (path + 1).clamp(max=5)
        if wrong != "nothing":
            true(self, path, *rest)

    monkeypatch.setattr(SlabCache, "commit", commit)
    case, script = several_rows()
    run, worst = Run(case, script, []), 0.0
    while run.rounds < ROUNDS and worst <= SHOWS:
        run.round()
        worst = run.cache_distance()
    assert worst > SHOWS


@torch.no_grad()
def test_a_seed_that_knows_its_row_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the place in the batch: rows then differ from their solo runs."""
    true = noise.gumbel

    def gumbel(seeds: Tensor, *rest: Any) -> Tensor:
        return true(seeds + torch.arange(len(seeds)), *rest)

    monkeypatch.setattr(noise, "gumbel", gumbel)
    case, script = several_rows()
    assert torch.equal(plain_text(case.alone(0)), script[:1])
    assert not torch.equal(plain_text(case.alone(1)), script[1:2])


@torch.no_grad()
def test_a_mask_of_the_first_row_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take the first row's length see another text than alone."""
    case, script = several_rows()
    true = masks.tree_mask

    def first_row(lengths: Tensor, *rest: Any, **named: Any) -> Tensor:
        return true(lengths[:1].expand_as(lengths), *rest, **named)

    monkeypatch.setattr(masks, "tree_mask", first_row)
    run = Run(case, script, [])
    while run.rounds < ROUNDS:
        run.round()
    written = [text[len(p) :] for text, p in zip(run.texts, case.prompts, strict=True)]
    assert written[0] == script[0, : len(written[0])].tolist()
    assert written[1] != script[1, : len(written[1])].tolist()
