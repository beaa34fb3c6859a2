"""What the config of an MLP speculator declares."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core import OptionError
from .fields import Shapes, VocabularyFields


@dataclass(kw_only=True, repr=False)
class MlpSpeculatorFields(VocabularyFields):
    """An MLP speculator's shape.

    Attributes:
        heads: K stages, each of which drafts one token.
        inner_dim: N, the width of states and embeddings; 0 for D, the target's hidden size.
        cell: what makes a state of the one before: `mlp`, or `lstm` as in Arctic's drafters.
        tied: whether all stages have the same weights, but for what the first one reads the
            target's feature with.
        scale_input: whether the feature is normalised first.
    """

    heads: int = 4
    inner_dim: int = 0
    cell: Literal["mlp", "lstm"] = "mlp"
    tied: bool = True
    scale_input: bool = True
    output: Literal["own", "trimmed"] = "own"
    embedding: Literal["shared", "own"] = "own"  # and trained, unlike other families'

    OPTIONS: ClassVar = (
        *("heads", "inner_dim", "cell", "tied", "scale_input"),
        *("output", "draft_vocab_size"),
    )
    RANGES: ClassVar = {"at least 1": ("heads",), "at least 0": ("inner_dim",)}

    @property
    def max_depth(self) -> int:
        return self.heads

    def validate_cell(self) -> None:
        """Part of the config's own validation."""
        if self.cell == "lstm" and not self.tied:
            raise OptionError(
                "drafter.cell is 'lstm' with drafter.tied false; expected stages that share their "
                "weights: leave drafter.tied out."
            )

    @property
    def width(self) -> int:
        """N."""
        return self.inner_dim or self.hidden_size

    @property
    def stages(self) -> int:
        """How many stages have weights of their own."""
        return 1 if self.tied else self.heads

    @property
    def gates(self) -> int:
        """How many vectors of width N a projection makes."""
        return 4 if self.cell == "lstm" else 1

    @property
    def inputs(self) -> list[int]:
        """What each projection reads: the first the feature, the others the state before."""
        others = min(self.heads - 1, 1) if self.tied else self.heads - 1
        return [self.hidden_size] + [self.width] * others

    def shapes(self) -> Shapes:
        wide, found = self.width, super().shapes()
        for number, inputs in enumerate(self.inputs):
            found[f"proj.{number}.weight"] = [self.gates * wide, inputs]
        for stage in range(self.stages):
            found[f"emb.{stage}.weight"] = [self.vocab_size, wide]
            found[f"head.{stage}.weight"] = [self.output_size, wide]
            for norm in ("ln", "state_ln") if self.cell == "lstm" else ("ln",):
                found |= {f"{norm}.{stage}.{part}": [wide] for part in ("weight", "bias")}
        return found
