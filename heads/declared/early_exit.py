"""What the config of an early-exit drafter declares."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .fields import Shapes
from .layer import Layer, LayerFields


@dataclass(kw_only=True, repr=False)
class EarlyExitFields(LayerFields):
    """Its shape.

    Attributes:
        feature_layers: the hidden state that the exit leaves, which layers of its own read.
        exit_layer: E, how many of the target's first layers draft; 0 for a share of them, see
            `EarlyExitConfig`.
        layers: K, how many decoder layers of its own follow. `layer` is None where there are none:
            the target's last norm and output layer read the exit, and there is nothing to train.
        output: the target's, or rows of its own for a trimmed vocabulary.
    """

    feature_layers: list[int] | tuple[int, ...] = (0,)
    exit_layer: int = 0
    layers: int = 1
    output: Literal["shared", "trimmed"] = "shared"

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("exit_layer", "layers", "output", "draft_vocab_size", "partial_rotary_factor"),
    )
    RANGES: ClassVar = {
        "at least 0": ("exit_layer",),
        "at least 1": ("layers",),
        "more than 0, at most 1": ("partial_rotary_factor",),
    }

    @property
    def decided(self) -> bool:
        return self.layer is None or super().decided

    def shapes(self) -> Shapes:
        found = super().shapes()
        if self.layer is not None:
            layer = Layer.of(self.layer)
            found |= layer.shapes("model.layers.") | {"norm.weight": [layer.hidden_size]}
        if self.output != "shared":
            found["lm_head.weight"] = [self.output_size, self.hidden_size]
        return found
