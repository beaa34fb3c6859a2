"""Fields of a recipe that check their value: numbers in a range, and one of some strings.

A check raises ValueError with what was found and expected; `build` puts the key's path before it.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from huggingface_hub.dataclasses import validated_field


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key's path and what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known name that is closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def number(
    default: Any,
    gt: float = -math.inf,
    ge: float = -math.inf,
    lt: float = math.inf,
    le: float = math.inf,
) -> Any:
    """The field of a finite number that is greater than `gt`, at least `ge`, and so on."""
    bounds = {"greater than": gt, "at least": ge, "less than": lt, "at most": le}
    finite = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    expected = f"a finite number {' and '.join(finite)}"

    def check(value: float | None) -> None:  # whether null is a value is said by the type
        if value is not None and not (gt < value < lt and ge <= value <= le):
            raise ValueError(f"found {value!r}, expected {expected}")

    return validated_field(check, default=default)


def positive(default: Any) -> Any:
    return number(default, gt=0)


def one_of(*choices: str, default: str) -> Any:
    """The field of a string that is one of `choices`."""

    def check(value: str) -> None:
        if value not in choices:
            near = nearest(value, choices)
            raise ValueError(f"found {value!r}{near}; expected one of {', '.join(choices)}")

    return validated_field(check, default=default)
