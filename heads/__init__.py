"""Drafters: one file a family, and the few things that drafters and runtime share in `core`."""

if __name__ != "headstart.heads":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.heads import …` instead.")

from .artifacts.loading import load_drafter
from .artifacts.manifest import Manifest, fingerprint
from .artifacts.saving import save_drafter
from .core import (
    FINAL,
    ArtifactError,
    DecodingError,
    HeadstartError,
    OptionError,
    Sampling,
    SlabCache,
    TokenTree,
    Topology,
    UnsupportedTarget,
)
from .drafter import Drafter, DrafterConfig, Step
from .families import FAMILIES, Family, family
from .group import DrafterGroup
from .trainable import TrainableDrafter

__all__ = [
    "FAMILIES", "FINAL", "ArtifactError", "DecodingError", "Drafter", "DrafterConfig",
    "DrafterGroup", "Family", "HeadstartError", "Manifest", "OptionError", "Sampling", "SlabCache",
    "Step", "TokenTree", "Topology", "TrainableDrafter", "UnsupportedTarget", "family",
    "fingerprint", "load_drafter", "save_drafter",
]  # fmt: skip
