"""What the config of suffix decoding declares."""

from dataclasses import dataclass
from typing import ClassVar

from ..core import OptionError
from .fields import Fields, Shapes

_MOST = 256  # matches that are followed
_LONGEST = 64  # tokens that are compared; weights are powers of two in float32
_TOKENS = 1 << 26


@dataclass(kw_only=True, repr=False)
class SuffixFields(Fields):
    """How much earlier text is kept, and how it is looked up.

    Attributes:
        max_match: P, how many of the last tokens are compared.
        matches: M, how many places of the request's own text are followed, and how many of the
            answers that are kept.
        max_tokens: of answers that are kept, the oldest make room for new ones; a token takes 8
            bytes.
    """

    feature_layers: list[int] | tuple[int, ...] = ()
    max_match: int = 16
    matches: int = 16
    max_tokens: int = (1 << 18) - 1  # one less than a power of 64, the steps of a search

    OPTIONS: ClassVar = ("max_match", "matches", "max_tokens")

    def validate_suffix(self) -> None:
        """Part of the config's own validation."""
        least = {"max_match": 1, "matches": 1, "max_tokens": 4 * _LONGEST}
        most = {"max_match": _LONGEST, "matches": _MOST, "max_tokens": _TOKENS}
        for name, limit in most.items():
            if not least[name] <= (value := getattr(self, name)) <= limit:
                raise OptionError(f"drafter.{name} is {value}; expected {least[name]} … {limit}.")

    def shapes(self) -> Shapes:
        return {}
