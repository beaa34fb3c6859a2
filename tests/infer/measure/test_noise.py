"""Intervals of medians, by enumeration of the coin tosses that they rest on."""

import itertools
import math

from headstart.infer.measure.noise import CONFIDENCE, compare, median_interval


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    """Every pattern of n values above and below the median is as likely."""
    for count in range(6, 13):
        found = median_interval(list(range(count)))
        assert found is not None
        low, high = map(int, found)
        covered = {}
        for rank in (low, low + 1):
            held = sum(
                rank < sum(tosses) < count - rank or (rank <= sum(tosses) - 1 < count - 1 - rank)
                for tosses in itertools.product((0, 1), repeat=count)
            )
            covered[rank] = held / 2**count
        assert covered[low] >= CONFIDENCE > covered[low + 1] or high <= low + 1
        assert low + high == count - 1
    assert median_interval([1.0] * 5) is None


def test_a_difference_and_noise_are_told_apart() -> None:
    same = compare([1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98], [1.0] * 7)
    assert same is not None and same.within_noise is True
    faster = compare([2.0, 2.2, 1.8, 2.1, 1.9, 2.0], [1.0] * 6)
    assert faster is not None and faster.within_noise is False
    few = compare([2.0] * 5, [1.0] * 5)
    assert few is not None and few.within_noise is None


def test_a_unit_with_nothing_to_time_is_left_out() -> None:
    nothing = math.nan
    found = compare([2.0, nothing, 2.0, 2.0], [1.0, 1.0, nothing, 1.0])
    assert found is not None and (found.least, found.most) == (2.0, 2.0)
    assert compare([nothing, 1.0], [1.0, nothing]) is None
