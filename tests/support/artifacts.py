"""Tiny artifacts whose every weight is one value, so that one glance tells which of two it is."""

from pathlib import Path
from typing import Any

import torch

from headstart.heads import Manifest, fingerprint, load_drafter, save_drafter
from headstart.heads.medusa import Medusa, MedusaConfig
from tests.support.tiny import tiny

OLD, NEW = 0.1, 0.2


def medusa(value: float = OLD, target: Any = None) -> Medusa:
    """Two heads whose every weight is `value`."""
    target = tiny("llama") if target is None else target
    drafter = Medusa(MedusaConfig.for_target(target, heads=2)).to(target.dtype).bind(target)
    with torch.no_grad():
        drafter.weight.fill_(value)
    return drafter.eval()


def save(folder: Path, value: float = OLD) -> Path:
    manifest = Manifest("medusa", "tiny-llama", fingerprint(tiny("llama")))
    return save_drafter(medusa(value), folder, manifest, "# card\n")


def value_of(folder: Path) -> float:
    """Load an artifact; which of the two it is."""
    drafter: Any = load_drafter(folder, tiny("llama"))
    return round(float(drafter.weight.unique().item()), 3)
