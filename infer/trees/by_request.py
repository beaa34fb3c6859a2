"""The tree that each request is decoded with, by its batch size and temperature.

The more prompts are decoded at once, and the more varied their text is, the smaller is the tree
that is fastest: a plan is for one batch size and temperature.
"""

import math
from collections.abc import Mapping
from typing import Any

from headstart.heads import OptionError

from .policy import Policy

Kind = tuple[int, float]
"""A batch size, and a temperature: 0 is greedy decoding."""

USUAL: Kind = (1, 0.0)


def heat_of(do_sample: bool | None, temperature: float | None) -> float:
    """The temperature of a request, of options as `generate` takes them; 0 where it is greedy."""
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else temperature


def _can_be(kind: Any) -> bool:
    numbers = isinstance(kind, tuple) and [type(each) in (int, float) for each in kind]
    return numbers == [True, True] and kind[0] >= 1 and 0 <= kind[1] < math.inf


class TreesByRequest(dict[Kind, Policy]):
    """Trees by kind of request, at least one.

    Raises:
        OptionError: there is none, or a batch size or temperature cannot be.
    """

    def __init__(self, trees: Mapping[Kind, Policy]):
        super().__init__(trees)
        if not self or not all(_can_be(kind) for kind in self):
            raise OptionError(
                f"tree is by kind of request, for {list(self)}; expected at least one, each a "
                f"batch size from 1 and a temperature from 0, such as {USUAL}."
            )

    def of(self, batch: int = 1, temperature: float = 0.0) -> Policy:
        """The tree of the nearest batch size, by their ratio, and there the nearest temperature.

        >>> trees = TreesByRequest({(1, 0.0): "a", (8, 0.0): "b", (8, 1.0): "c"})
        >>> trees.of(), trees.of(2, 0.7), trees.of(3), trees.of(16, 0.7)
        ('a', 'a', 'b', 'c')
        """

        def distance(kind: Kind) -> tuple[float, float, float]:
            return abs(math.log(kind[0] / batch)), kind[0], abs(kind[1] - temperature)

        return self[min(self, key=distance)]
