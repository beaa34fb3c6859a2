"""Fields of a recipe that check their value: numbers in a range, and one of some strings.

A check raises ValueError with what was found and expected; `build` puts the key's path before it.
"""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

from huggingface_hub.dataclasses import validated_field


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key's path and what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known name that is closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


_BOUNDS = {
    "gt": ("greater than", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("less than", operator.lt),
    "le": ("at most", operator.le),
}


def number(default: Any, **bounds: float) -> Any:
    """The field of a finite number within `bounds`: `gt`, `ge`, `lt`, `le`."""

    def check(value: float | None) -> None:
        if value is None:  # the type says whether null is a value
            return
        if not math.isfinite(value):
            raise ValueError(f"found {value!r}, expected a finite number")
        for name, bound in bounds.items():
            words, holds = _BOUNDS[name]
            if not holds(value, bound):
                raise ValueError(f"found {value!r}, expected {words} {bound}")

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
