"""What the configs of Medusa and Medusa-2 declare."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .fields import Shapes, VocabularyFields


@dataclass(kw_only=True, repr=False)
class MedusaFields(VocabularyFields):
    """Medusa's shape; each head has its own output layer, unless it is `shared`."""

    heads: int = 4  # K, how many tokens beyond the next one are predicted
    layers: int = 1  # L residual blocks per head
    output: Literal["shared", "own", "trimmed"] = "shared"

    OPTIONS: ClassVar = ("heads", "layers", "output", "draft_vocab_size")
    RANGES: ClassVar = {"at least 1": ("heads", "layers")}

    @property
    def max_depth(self) -> int:
        return self.heads

    def shapes(self) -> Shapes:
        blocks, size = [self.layers, self.heads], self.hidden_size
        found = {"weight": [*blocks, size, size], "bias": [*blocks, size]}
        if self.output != "shared":
            found["output"] = [self.heads, self.output_size, size]
        return super().shapes() | found


@dataclass(kw_only=True, repr=False)
class Medusa2Fields(MedusaFields):
    """Medusa's shape, the adapter's, and how both are trained."""

    rank: int = 32  # of the adapter's factors
    alpha: int | float = 16  # the adapter's scale is alpha / rank
    dropout: int | float = 0.05  # on the input of the adapter's factors, while training
    modules: list[str] | tuple[str, ...] = ()  # adapted layers; empty: all linear but the output
    heads_first: int | float = 0.5  # share of training in which heads learn alone; 0: one stage
    head_weight: int | float = 0.2  # λ0, of the heads' loss while heads and adapter both learn
    ramp: Literal["constant", "sine"] = "constant"  # sine: λ rises from 0 to λ0
    head_rate: int | float = 4.0  # the heads' learning rate in multiples of train.learning_rate

    OPTIONS: ClassVar = (
        *MedusaFields.OPTIONS,
        *("rank", "alpha", "dropout", "modules"),
        *("heads_first", "head_weight", "ramp", "head_rate"),
    )
    RANGES: ClassVar = {
        "at least 1": ("heads", "layers", "rank"),
        "more than 0": ("alpha", "head_weight", "head_rate"),
        "0 … 1, 1 excluded": ("dropout", "heads_first"),
    }
