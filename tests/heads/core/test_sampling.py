"""Counter-based randomness against integers and the softmax; warping against transformers."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.heads import Sampling
from headstart.heads.core import gumbel, row_seeds, uniform
from headstart.heads.core.noise import _splitmix

ALL = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
CRITICAL = 4.7534  # of the standard normal at alpha 1e-6, one side


def mix(state: int) -> int:
    """splitmix64's finalizer on Python's integers."""
    state &= ALL
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        state = ((state ^ (state >> shift)) * multiplier) & ALL
    return state ^ (state >> 31)


def unmix(state: int) -> int:
    """The inverse of `mix`."""

    def unshift(value: int, shift: int) -> int:
        found = value
        for _ in range(64 // shift + 1):
            found = value ^ (found >> shift)
        return found

    state = unshift(state, 31)
    for shift, multiplier in zip((27, 30), reversed(MULTIPLIERS), strict=True):
        state = unshift((state * pow(multiplier, -1, 2**64)) & ALL, shift)
    return state


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def chi_square_limit(freedom: int) -> float:
    """The critical value at alpha 1e-6 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + CRITICAL * math.sqrt(spread)) ** 3


def test_splitmix_gives_the_published_sequence() -> None:
    # The first outputs of splitmix64 seeded with 1234567, as its reference prints them.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + (i + 1) * GOLDEN) & ALL for i in range(5)]
    assert [mix(state) for state in states] == published
    found = _splitmix(torch.tensor([signed(state) for state in states]))
    assert found.tolist() == [signed(value) for value in published]


def test_splitmix_equals_integers() -> None:
    states = [0, 1, ALL, 2**63, 2**63 - 1, *torch.randint(-(2**62), 2**62, (200,)).tolist()]
    found = _splitmix(torch.tensor([signed(state & ALL) for state in states]))
    assert found.tolist() == [signed(mix(state)) for state in states]
    assert all(unmix(mix(state)) == state & ALL for state in states)


def test_uniform_is_keyed_by_seed_position_and_token() -> None:
    seeds, positions, tokens = [7, -3], [[0, 5], [9, 5]], [0, 1, 63]
    found = uniform(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))
    for row, seed in enumerate(seeds):
        for column, position in enumerate(positions[row]):
            state = mix(seed + mix(position + 1) * GOLDEN)
            for k, token in enumerate(tokens):
                bits = mix(state + (token + 1) * GOLDEN)
                expected = ((bits >> 11) + 0.5) * 2.0**-53
                assert found[row, column, k].item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("bits", [ALL, 0])
def test_uniform_stays_inside_the_open_interval(bits: int) -> None:
    """A key whose 64 bits are all ones (or zeros), found by running splitmix64 backwards."""
    state = (unmix(bits) - 2 * GOLDEN) & ALL  # the row's state for token 1
    seed = (unmix(state) - mix(4) * GOLDEN) & ALL  # at position 3
    arguments = torch.tensor([signed(seed)]), torch.tensor([[3]]), torch.tensor([1])
    assert 0 < uniform(*arguments).item() < 1
    assert math.isfinite(gumbel(*arguments).item())


def test_uniforms_are_uniform() -> None:
    draws = uniform(row_seeds(0, 8), torch.arange(100).expand(8, -1), torch.arange(500)).flatten()
    count = draws.numel()
    assert abs(draws.mean() - 0.5) < CRITICAL * math.sqrt(1 / 12 / count)
    assert abs(draws.var() - 1 / 12) < CRITICAL * math.sqrt(1 / 180 / count)
    for bins in (256, 1000):
        found = torch.histc(draws, bins, 0, 1)
        assert ((found - count / bins) ** 2 / (count / bins)).sum() < chi_square_limit(bins - 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbouring_keys_are_independent(axis: int) -> None:
    """Pairs of neighbours along seeds, positions and tokens fill the square evenly."""
    seeds = torch.arange(40) if axis == 0 else row_seeds(1, 40)
    draws = uniform(seeds, torch.arange(40).expand(40, -1), torch.arange(250))
    one = draws.narrow(axis, 0, draws.shape[axis] - 1).flatten()
    two = draws.narrow(axis, 1, draws.shape[axis] - 1).flatten()
    cell = (one * 16).long() * 16 + (two * 16).long()
    expected = cell.numel() / 256
    # Overlapping pairs make the statistic a little wider than chi-square, hence the factor.
    found = torch.bincount(cell, minlength=256)
    assert ((found - expected) ** 2 / expected).sum() < 1.2 * chi_square_limit(255)


def test_the_square_test_sees_a_lattice() -> None:
    draws = (torch.arange(400_000) * 0.754877666).frac()  # even alone, but neighbours lie on lines
    cell = (draws[:-1] * 16).long() * 16 + (draws[1:] * 16).long()
    expected = cell.numel() / 256
    found = torch.bincount(cell, minlength=256)
    assert ((found - expected) ** 2 / expected).sum() > 1.2 * chi_square_limit(255)


def argmax_counts(seeds: torch.Tensor, logits: torch.Tensor, draws: int) -> torch.Tensor:
    positions = torch.arange(draws).expand(len(seeds), -1)
    scores = logits.expand(len(seeds), draws, -1)
    chosen = Sampling(seeds).choose(scores, positions)
    return torch.bincount(chosen.flatten(), minlength=logits.numel()).double()


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    logits = torch.tensor([1.5, 0.0, -1.0, 3.0, 2.0, -2.5, 0.5, 1.0])
    found = argmax_counts(row_seeds(5, 20), logits, 10_000)
    expected = logits.double().softmax(-1) * 200_000
    assert ((found - expected) ** 2 / expected).sum() < chi_square_limit(7)
    # The check sees a distribution that is off by two per cent of its mass.
    wrong = (logits + torch.tensor([0, 0, 0, 0.08, 0, 0, 0, 0])).double().softmax(-1) * 200_000
    assert ((found - wrong) ** 2 / wrong).sum() > chi_square_limit(7)


def test_a_row_draws_alike_in_any_batch() -> None:
    seeds, tokens = torch.tensor([4, 9, -7]), torch.arange(10)
    positions = torch.tensor([[3, 4], [8, 1], [0, 2]])
    together = uniform(seeds, positions, tokens)
    for row in range(3):
        alone = uniform(seeds[row : row + 1], positions[row : row + 1], tokens)
        assert torch.equal(alone[0], together[row])
    # A subset of tokens keeps each token's own noise.
    assert torch.equal(uniform(seeds, positions, tokens[[7, 2]]), together[..., [7, 2]])


def test_row_seeds() -> None:
    assert row_seeds([5, 5, 6], 3).tolist() == [5, 5, 6]
    spread = row_seeds(11, 1000)
    assert len(set(spread.tolist())) == 1000
    assert torch.equal(spread[:3], row_seeds(11, 3))  # a row's seed does not depend on the batch
    assert not set(spread.tolist()) & set(row_seeds(12, 1000).tolist())
    assert spread.tolist() == [signed(mix(11 + i * GOLDEN)) for i in range(1000)]


def test_warp_equals_transformers_row_by_row() -> None:
    warpers = [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ]
    logits = torch.randn(3, 5, 64, dtype=torch.float64) * 3
    sampling = Sampling(None, LogitsProcessorList(warpers))
    assert sampling.rowwise
    warped = sampling.warp(logits)
    nothing: Any = None
    for row in range(3):
        for node in range(5):
            single: Any = logits[row, node].float().unsqueeze(0)
            expected = LogitsProcessorList(warpers)(nothing, single)[0]
            assert torch.equal(warped[row, node], expected)
    assert torch.isinf(warped).any()


def test_processors_that_read_text_are_known() -> None:
    sampling = Sampling(
        None,
        LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.5)]),
    )
    assert not sampling.rowwise
    logits: Any = torch.randn(2, 8)
    prefix: Any = torch.tensor([[1, 2], [3, 3]])
    assert sampling.processors is not None
    assert torch.equal(sampling.process(prefix, logits), sampling.processors(prefix, logits))
    # A drafter's proposals get the temperature alone.
    assert torch.equal(sampling.warp(logits), logits / 0.5)
    assert Sampling().rowwise and torch.equal(Sampling().choose(logits, prefix), logits.argmax(-1))
