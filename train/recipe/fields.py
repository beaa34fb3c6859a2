"""Fields of a recipe's sections that check their values."""

import difflib
import functools
from collections.abc import Iterable
from math import inf, isfinite
from typing import Any

from huggingface_hub.dataclasses import validated_field


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key's path and what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known name that is closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def number(
    default: Any, gt: float = -inf, ge: float = -inf, lt: float = inf, le: float = inf
) -> Any:
    """The field of a finite number that is greater than `gt`, at least `ge`, and so on."""
    bounds = {"greater than": gt, "at least": ge, "less than": lt, "at most": le}
    expected = " and ".join(f"{words} {n}" for words, n in bounds.items() if isfinite(n))

    def check(value: float | None) -> None:  # whether null is a value is said by the type
        if value is not None and not (gt < value < lt and ge <= value <= le):
            raise ValueError(f"found {value!r}, expected a finite number {expected}")

    return validated_field(check, default=default)


positive = functools.partial(number, gt=0)


def one_of(*choices: str) -> Any:
    """The field of a string that is one of `choices`, by default the first."""

    def check(value: str) -> None:
        if value not in choices:
            near = nearest(value, choices)
            raise ValueError(f"found {value!r}{near}; expected one of {', '.join(choices)}")

    return validated_field(check, default=choices[0])
