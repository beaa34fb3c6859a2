"""Of all combinations of settings, a few in which every two of them still meet."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The cases as parameters of a test, most of them proofs.

    Any two values that stand together in a case stand together in one that is not a proof: what
    goes wrong with one setting, or with two of them, shows by default.
    """
    pairs = [set(combinations(enumerate(map(repr, case)), 2)) for case in cases]
    left, chosen = set().union(*pairs), set()
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        chosen.add(best)
        left -= pairs[best]
    return [
        pytest.param(*case, marks=() if number in chosen else pytest.mark.proof)
        for number, case in enumerate(cases)
    ]
