"""What the config of a retrieval drafter declares."""

from dataclasses import dataclass
from typing import ClassVar

from ..core import OptionError
from .fields import Fields, Shapes

_MOST = 256  # matches that are followed
_LONGEST = 64  # tokens of a context; their weights are powers of two in float32
_TOKENS = 1 << 31


@dataclass(kw_only=True, repr=False)
class RetrievalFields(Fields):
    """How much text is kept, and how it is looked up.

    Attributes:
        max_match: P, how many of the last tokens are compared.
        matches: M, how many places of the kept text are followed.
        max_tokens: no more are kept of the texts that a drafter is made of.
        tokens: N, how many are kept, one after each text included.
        places: how many of them may be proposed.
    """

    feature_layers: list[int] | tuple[int, ...] = ()
    max_match: int = 16
    matches: int = 32
    max_tokens: int = 20_000_000
    tokens: int = 0
    places: int = 0

    collects: ClassVar = True
    OPTIONS: ClassVar = ("max_match", "matches", "max_tokens")

    def validate_retrieval(self) -> None:
        """Part of the config's own validation."""
        most = {"max_match": _LONGEST, "matches": _MOST, "max_tokens": _TOKENS - 2 * _LONGEST}
        for name, limit in most.items():
            if not 1 <= (value := getattr(self, name)) <= limit:
                raise OptionError(f"drafter.{name} is {value}; expected 1 … {limit}.")

    def shapes(self) -> Shapes:
        return {"text": [self.max_match + 1 + self.tokens], "order": [max(self.places, 1)]}
