"""How a node's children may be chosen, by name; it needs no torch."""

from typing import Literal

Expansion = Literal["topk", "coupled", "with_replacement", "without_replacement"]
SAMPLED = ("with_replacement", "without_replacement")
"""The expansions whose children are random draws, which a rule weighs by their probabilities."""
