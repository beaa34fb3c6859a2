"""What the config of prompt lookup declares."""

from dataclasses import dataclass
from typing import ClassVar

from ..core import OptionError
from .fields import Fields, Shapes

_MOST = 1024  # tokens that are compared at each position, and matches that are followed


@dataclass(kw_only=True, repr=False)
class LookupFields(Fields):
    """How text is looked up.

    Of the matches the longest are followed, the latest of equals; a node has a child of each at
    most.
    """

    feature_layers: list[int] | tuple[int, ...] = ()
    max_match: int = 8  # the longest suffix that is compared
    min_match: int = 1  # the shortest that counts as a match
    matches: int = 8  # how many are followed

    OPTIONS: ClassVar = ("max_match", "min_match", "matches")

    def validate_lookup(self) -> None:
        """Part of the config's own validation."""
        if not 1 <= self.min_match <= self.max_match <= _MOST or not 1 <= self.matches <= _MOST:
            raise OptionError(
                f"drafter.min_match is {self.min_match}, max_match {self.max_match} and matches "
                f"{self.matches}; expected 1 ≤ min_match ≤ max_match ≤ {_MOST}, and 1 … "
                f"{_MOST} matches."
            )

    def shapes(self) -> Shapes:
        return {}
