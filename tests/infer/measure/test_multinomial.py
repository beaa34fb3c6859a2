"""The exact test of counts: known tails, and how often it fails a true distribution."""

import itertools
import math

import pytest

from headstart.infer.measure.multinomial import multinomial_p_value


def every_count(draws: int, bins: int) -> list[tuple[int, ...]]:
    each = itertools.product(range(draws + 1), repeat=bins - 1)
    return [(*few, draws - sum(few)) for few in each if sum(few) <= draws]


@pytest.mark.parametrize(
    "chances", [[0.5, 0.3, 0.2], [0.9, 0.09, 0.01], [0.01, 0.09, 0.9], [0.4, 0.3, 0.2, 0.1]]
)
def test_a_true_distribution_is_not_failed_more_often_than_said(chances: list[float]) -> None:
    """Over all outcomes of 20 draws, with their probabilities. Pearson's test breaks this."""
    draws, judged = 20, []
    for counts in every_count(draws, len(chances)):
        log = math.lgamma(draws + 1)
        log += sum(
            n * math.log(p) - math.lgamma(n + 1) for n, p in zip(counts, chances, strict=True)
        )
        judged.append((multinomial_p_value(counts, chances), math.exp(log)))
    assert math.isclose(math.fsum(mass for _, mass in judged), 1)
    for level, _ in judged:
        assert math.fsum(mass for p, mass in judged if p <= level) <= level * (1 + 1e-9)
    assert min(p for p, _ in judged) < 1e-6


def test_two_bins_are_the_binomial_test() -> None:
    """P(at least 9 of 10) = 11 / 1024, and twice that."""
    assert math.isclose(multinomial_p_value([9, 1], [0.5, 0.5]), 22 / 1024)
    assert multinomial_p_value([5, 5], [0.5, 0.5]) == 1


def test_tiny_chances_count() -> None:
    """One draw in a thousand of what comes once in 1e9, and none of what has no chance."""
    assert multinomial_p_value([999, 1], [1 - 1e-9, 1e-9]) == pytest.approx(2e-6, rel=1e-3)
    assert multinomial_p_value([998, 1, 1], [1 - 1e-9, 5e-10, 5e-10]) < 1e-9
    assert multinomial_p_value([999, 1], [1.0, 0.0]) == 0
    assert multinomial_p_value([1000, 0], [1.0, 0.0]) == 1
    assert multinomial_p_value([0, 1, 999], [0.0, 0.001, 0.999]) == 1


def test_many_small_differences_add_up() -> None:
    """Each of 40 bins is off by two standard deviations, which none shows alone."""
    draws = 4000
    off = [20, -20] * 20
    assert multinomial_p_value([draws // 40 + each for each in off], [1 / 40] * 40) < 1e-9
