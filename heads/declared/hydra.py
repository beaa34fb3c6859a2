"""What Hydra's config declares."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .fields import Shapes, VocabularyFields
from .layer import Layer


@dataclass(kw_only=True, repr=False)
class HydraFields(VocabularyFields):
    """Hydra's shape; each head has its own output layer, unless it is `shared`."""

    heads: int = 4  # K, how many tokens beyond the next one are predicted
    layers: int = 1  # L blocks per head
    prefix: bool = False  # whether a layer with its own cache reads the features first (Hydra++)
    output: Literal["shared", "own", "trimmed"] = "shared"
    dropout: float = 0.0  # of what every block and output layer reads, while training
    layer: dict[str, Any] | None = None  # the prefix's, see `Layer`; taken from the target
    embedding_scale: float = 1.0  # of embeddings; found when training starts, 1 in published heads

    OPTIONS: ClassVar = ("heads", "layers", "prefix", "output", "draft_vocab_size", "dropout")
    RANGES: ClassVar = {"at least 1": ("heads", "layers"), "0 … 1, 1 excluded": ("dropout",)}

    @property
    def max_depth(self) -> int:
        return self.heads

    @property
    def decided(self) -> bool:
        return not self.prefix or Layer.of(self.layer).plain

    def shapes(self) -> Shapes:
        size = self.hidden_size
        found = super().shapes() | self.embedding_shapes(size)
        if self.prefix:
            found |= Layer.of(self.layer).shapes("prefix.layers.") | {"prefix.norm.weight": [size]}
        for head in range(self.heads):
            for block in range(self.layers):
                width = size if block else (head + 2) * size
                parts = ("linear",) if block else ("linear", "res_connection")
                for part in parts:
                    name = f"mlp.{head}.{block}.{part}"
                    found |= {f"{name}.weight": [size, width], f"{name}.bias": [size]}
            if self.output != "shared":
                out = self.output_size
                found |= {f"output.{head}.weight": [out, size], f"output.{head}.bias": [out]}
        return found
