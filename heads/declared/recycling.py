"""What the config of token recycling declares."""

from dataclasses import dataclass
from typing import ClassVar

from ..core import OptionError
from .fields import Fields, Shapes

_MOST = 64  # successors that are kept of a token


@dataclass(kw_only=True, repr=False)
class RecyclingFields(Fields):
    """What the table of successors holds."""

    successors: int = 8  # how many are kept of each token; a node has no more children

    OPTIONS: ClassVar = ("successors",)

    def validate_recycling(self) -> None:
        """Part of the config's own validation."""
        most = min(_MOST, self.vocab_size or _MOST)
        if not 1 <= self.successors <= most:
            raise OptionError(
                f"drafter.successors is {self.successors}; expected 1 … {most}, of a vocabulary of "
                f"{self.vocab_size} tokens."
            )

    def shapes(self) -> Shapes:
        return {}
