"""What the config of an early-exit drafter declares."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core import OptionError
from .fields import Shapes
from .layer import Layer, LayerFields


@dataclass(kw_only=True, repr=False)
class EarlyExitFields(LayerFields):
    """Its shape.

    Attributes:
        feature_layers: the hidden state that the exit leaves, which layers of its own read.
        exit_layer: E, how many of the target's first layers draft; 0 for a share of them, see
            `EarlyExitConfig`.
        layers: K, how many decoder layers of its own follow, of the sizes `layer`. With none the
            target's last norm and output layer read the exit, and there is nothing to train.
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
        "at least 0": ("exit_layer", "layers"),
        "more than 0, at most 1": ("partial_rotary_factor",),
    }

    def validate_layers(self) -> None:
        """Part of the config's own validation."""
        if self.output != "shared" and not self.layers:
            raise OptionError(
                f"drafter.output is {self.output!r} and drafter.layers 0; expected 'shared', the "
                "target's own output layer, where no layer is trained."
            )

    @property
    def decided(self) -> bool:
        return self.layers == 0 or super().decided

    def shapes(self) -> Shapes:
        found = super().shapes()
        if self.layers:
            layer = Layer.of(self.layer)
            found |= layer.shapes("model.layers.") | {"norm.weight": [layer.hidden_size]}
        if self.output != "shared":
            found["lm_head.weight"] = [self.output_size, self.hidden_size]
        return found
