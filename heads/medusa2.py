"""Medusa-2 (Cai et al. 2024, arXiv 2401.10774, section 2.2.2): Medusa heads and target, jointly.

The heads are Medusa's. The target is trained with them, through a LoRA adapter: the heads' loss
makes it easier to predict ahead, and self-distillation from the same model without the adapter
keeps its output close to what it was. Decoding is exact with respect to the adapted target.
"""

from pathlib import Path
from typing import Any, Self

from huggingface_hub.dataclasses import strict

from .declared.medusa import Medusa2Fields
from .medusa import Medusa, MedusaConfig
from .parts.adapter import Adapter


@strict
class Medusa2Config(Medusa2Fields, MedusaConfig):
    """See `Medusa2Fields`."""

    model_type = "headstart_medusa2"


class Medusa2(Medusa):
    """K heads, and the adapter that their target was trained with."""

    config_class = Medusa2Config

    def __init__(self, config: Medusa2Config):
        super().__init__(config)
        self.adapter = Adapter(config.rank, config.alpha, config.dropout, config.modules)

    def train(self, mode: bool = True) -> Self:
        """Switch the adapter's dropout with the heads: it is off while decoding."""
        if self.adapter is not None:
            self.adapter.train(mode)
        return super().train(mode)

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        """Save the heads, and the adapter beside them if it is in the target."""
        super().save_pretrained(folder, **options)
        if self.adapter is not None and self.adapter.attached:
            self.adapter.save(Path(folder))

    def without_adapter(self) -> Medusa:
        sizes = {name: getattr(self.config, name) for name in MedusaConfig.OPTIONS}
        same = {"hidden_size": self.config.hidden_size, "vocab_size": self.config.vocab_size}
        heads = Medusa(MedusaConfig(**sizes, **same)).to(self.device, self.dtype).eval()  # type: ignore[arg-type]
        heads.load_state_dict(self.state_dict())
        return heads
