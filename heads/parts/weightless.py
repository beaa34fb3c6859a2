"""A base of drafters without weights, which their family's name alone loads."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ..drafter import Drafter


def load_without_weights(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
    """A drafter that is its config alone, as by `from_pretrained`, for which it needs weights."""
    config = cls.config_class.from_pretrained(name, local_files_only=Path(name).is_dir())
    drafter = cls(config, *args).eval()
    report = {f"{kind}_keys": [] for kind in ("missing", "unexpected", "mismatched")}
    return (drafter, report) if options.get("output_loading_info") else drafter


def save_without_weights(drafter: Drafter, folder: Any) -> None:
    """Write the config, and a file of weights without tensors, since every artifact has one."""
    drafter.config.save_pretrained(folder)
    save_file({}, Path(folder) / "model.safetensors", metadata={"format": "pt"})


class WeightlessDrafter(Drafter):
    """A drafter that is its config alone."""

    weightless = True

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """The drafter that a config.json describes."""
        return load_without_weights(cls, name, *args, **options)

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        """See `save_without_weights`."""
        save_without_weights(self, folder)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return []
