"""The tree that each request is decoded with, by its batch size and temperature.

The more prompts are decoded at once, and the more varied their text is, the smaller is the tree
that is fastest: a plan is for one batch size and temperature.
"""

import math

from .policy import Policy


def heat_of(do_sample: bool | None, temperature: float | None) -> float:
    """The temperature of a request, of options as `generate` takes them; 0 where it is greedy."""
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else temperature


class TreesByRequest(dict[tuple[int, float], Policy]):
    """Trees by batch size and temperature, at least one; temperature 0 is greedy decoding."""

    def of(self, batch: int = 1, temperature: float = 0.0) -> Policy:
        """The tree of the nearest batch size, by their ratio, and there the nearest temperature.

        >>> trees = TreesByRequest({(1, 0.0): "a", (8, 0.0): "b", (8, 1.0): "c"})
        >>> trees.of(), trees.of(2, 0.7), trees.of(3), trees.of(16, 0.7)
        ('a', 'a', 'b', 'c')
        """

        def distance(kind: tuple[int, float]) -> tuple[float, float, float]:
            return abs(math.log(kind[0] / batch)), kind[0], abs(kind[1] - temperature)

        return self[min(self, key=distance)]
