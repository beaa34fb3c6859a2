"""The settings that every drafter's config has, and those of a drafter with an output layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core import OptionError
from ..core.final import FINAL

Shapes = dict[str, list[int]]
"""The shape of each tensor, by name."""

MOST_PARTS = 4096
"""Of heads × layers × depths; a module of more would take minutes to build without any weight."""

_RANGES = {
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "more than 0": lambda value: value > 0,
    "more than 0, at most 1": lambda value: 0 < value <= 1,
    "0 … 1": lambda value: 0 <= value <= 1,
    "0 … 1, 1 excluded": lambda value: 0 <= value < 1,
}


@dataclass(kw_only=True, repr=False)
class Fields:
    """What every drafter's `config.json` says.

    `feature_layers` are the hidden states that it reads, see `FeatureTap`; there may be none.
    """

    hidden_size: int = 0  # D of the target
    vocab_size: int = 0  # V of the target's output layer
    feature_layers: list[int] | tuple[int, ...] = (FINAL,)

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The names that a recipe's drafter section may set."""

    RANGES: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Ranges, see `_RANGES`, and the numbers among the options that must be in them."""

    NEEDS: ClassVar[dict[str, str]] = {}
    """Options that have an effect only where another one is set too: that one, by name."""

    collects: ClassVar[bool] = False
    """Whether such drafters are made of texts of the target, see `Drafter.collect`."""

    @classmethod
    def check_options(cls, family: str, options: Mapping[str, Any]) -> None:
        """Refuse options that the family does not have, or that would have no effect.

        Raises:
            OptionError: there is one.
        """
        if unknown := sorted(options.keys() - set(cls.OPTIONS)):
            raise OptionError(
                f"drafter.{unknown[0]} is not an option of {family!r}; expected one of: "
                f"{', '.join(cls.OPTIONS)}."
            )
        for name, other in cls.NEEDS.items():
            default, off = getattr(cls, name), getattr(cls, other)
            if options.get(name, default) != default and options.get(other, off) in (off, []):
                raise OptionError(
                    f"drafter.{name} is {options[name]}, which has no effect without "
                    f"drafter.{other}; set drafter.{other} as well, or leave it out."
                )

    def validate_ranges(self) -> None:
        """Part of the config's own validation."""
        sizes = {name: getattr(self, name, 1) for name in ("heads", "layers", "depths")}
        parts = [size for size in sizes.values() if type(size) is int]
        if math.prod(parts) > MOST_PARTS:
            said = ", ".join(f"{name} {sizes[name]}" for name in sizes if name in self.OPTIONS)
            raise OptionError(
                f"drafter.{said}: more than {MOST_PARTS} of them together; lower one of them."
            )
        for expected, names in self.RANGES.items():
            for name in names:
                if not _RANGES[expected](value := getattr(self, name)):
                    raise OptionError(f"drafter.{name} is {value}; expected {expected}.")

    def validate_mask_token(self) -> None:
        """Part of the config's own validation: a mask token, if any, is one of the vocabulary."""
        token, known = getattr(self, "mask_token_id", None), self.vocab_size
        if token is not None and known and not 0 <= token < known:
            raise OptionError(f"drafter.mask_token_id is {token}; expected 0 … {known - 1}.")

    @property
    def max_depth(self) -> int | None:
        """The deepest level that the drafter can propose for; None when there is no bound."""
        return None

    @property
    def decided(self) -> bool:
        """Whether `shapes` answers for such settings; else the drafter itself is asked."""
        return True

    def shapes(self) -> Shapes:
        """All tensors of the drafter's file of weights, from the settings alone.

        Raises:
            ValueError: there is no drafter of these settings.
        """
        raise NotImplementedError


@dataclass(kw_only=True, repr=False)
class VocabularyFields(Fields):
    """Which output layer a drafter has; a family says which `output` there are.

    Attributes:
        output: the output layer: `shared` borrows the target's, `own` is for all tokens, `trimmed`
            for the `draft_vocab_size` most frequent ones of the corpus.
        draft_vocab_size: size of the trimmed vocabulary; 0 unless `output` is `trimmed`.
        embedding: whose embeddings a drafter reads that reads tokens: the target's (`shared`), or
            `own` ones, which published heads may have and which are not trained here.
    """

    output: Any = "shared"
    draft_vocab_size: int = 0
    embedding: Literal["shared", "own"] = "shared"

    @property
    def output_size(self) -> int:
        """Vd of the drafter's output layer."""
        return self.draft_vocab_size or self.vocab_size

    def validate_draft_vocabulary(self) -> None:
        """Part of the config's own validation: a size where it is trimmed, and only there."""
        size = self.draft_vocab_size
        if self.output not in ("shared", "own", "trimmed"):
            raise OptionError(
                f"drafter.output is {self.output!r}; expected 'shared', 'own' or 'trimmed'."
            )
        if (self.output == "trimmed") != (size > 0) or size > max(self.vocab_size, 0):
            raise OptionError(
                f"drafter.draft_vocab_size is {size} with output {self.output!r}; expected "
                f"1 … {self.vocab_size} with 'trimmed' and 0 otherwise."
            )

    def shapes(self) -> Shapes:
        """The ids of a trimmed vocabulary."""
        return {"vocabulary": [self.draft_vocab_size]} if self.draft_vocab_size else {}

    def embedding_shapes(self, width: int) -> Shapes:
        """Embeddings of its own, for a drafter that reads tokens."""
        own = self.embedding == "own"
        return {"embed_tokens.weight": [self.vocab_size, width]} if own else {}
