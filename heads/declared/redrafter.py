"""What ReDrafter's config declares."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .fields import Shapes, VocabularyFields


@dataclass(kw_only=True, repr=False)
class ReDrafterFields(VocabularyFields):
    """ReDrafter's shape."""

    depths: int = 5  # K, how many steps of the cell a training loss covers
    layers: int = 2  # L residual blocks of the head
    rnn: bool = True  # whether there is a cell; without it embeddings are summed
    exit_dim: int = 0  # width of these blocks; 0 for 2 D, the width of feature and state
    output: Literal["own", "trimmed"] = "own"

    OPTIONS: ClassVar = ("depths", "layers", "rnn", "exit_dim", "output", "draft_vocab_size")
    RANGES: ClassVar = {"at least 1": ("depths",), "at least 0": ("exit_dim", "layers")}

    def shapes(self) -> Shapes:
        size, both = self.hidden_size, 2 * self.hidden_size
        width = self.exit_dim or both
        found = super().shapes() | self.embedding_shapes(size)
        if self.rnn:
            found |= {f"rnn_{name}.weight": [size, size] for name in "wu"} | {"rnn_u.bias": [size]}
        if width != both:
            found |= {"input_proj.weight": [width, both], "input_proj.bias": [width]}
        for block in range(self.layers):
            name = f"lm_head.{block}.linear"
            found |= {f"{name}.weight": [width, width], f"{name}.bias": [width]}
        return found | {f"lm_head.{self.layers}.weight": [self.output_size, width]}
