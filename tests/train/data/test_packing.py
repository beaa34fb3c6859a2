"""Packing: every row once, none too many, little room left, and the same for the same seed."""

from collections import Counter

import numpy as np
import pytest

from headstart.train.data.packing import Packs, best_fit
from headstart.train.data.prefixes import DistillError


def lengths(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(4, 1, count)
    return np.clip(drawn, 1, 500).astype(np.int64)


@pytest.mark.parametrize(("count", "room"), [(1, None), (7, 600), (1000, None), (1000, 2000)])
def test_every_row_is_in_one_pack_that_has_room(count: int, room: int | None) -> None:
    sizes = lengths(count)
    packs = Packs(sizes, room)
    rows = packs.rows(np.random.default_rng(0))
    assert sorted(row for pack in rows for row in pack) == list(range(count))
    assert [sum(sizes[pack]) for pack in rows] == packs.sizes.tolist()
    assert packs.sizes.max() <= (room or sizes.max())


def test_little_room_is_left() -> None:
    sizes = lengths(1000)
    packs = Packs(sizes)
    needed = -(-sizes.sum() // sizes.max())
    assert len(packs.sizes) <= 1.02 * needed  # best-fit decreasing is at most 11/9 of the optimum


def test_the_least_room_that_fits_is_taken() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]
    assert best_fit(np.array([7, 5, 3]), 10).tolist() == [0, 1, 0]
    assert best_fit(np.array([10, 10, 1]), 10).tolist() == [0, 1, 2]


def test_an_epoch_draws_other_rows_of_the_same_lengths() -> None:
    sizes = lengths(1000)
    packs = Packs(sizes)
    one, same, two = (packs.rows(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != two
    for mine, other in zip(one, two, strict=True):
        assert Counter(sizes[mine]) == Counter(sizes[other])


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DistillError, match="packed_length is 9, but the longest row has 10 tokens"):
        Packs(np.array([3, 10]), 9)
