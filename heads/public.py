"""Names of `heads` whose modules import torch; the package imports this file on first use."""

from .artifacts.loading import load_drafter
from .artifacts.manifest import Manifest, fingerprint
from .artifacts.saving import save_drafter
from .core import Sampling, SlabCache, TokenTree, Topology
from .drafter import Drafter, DrafterConfig, Step
from .group import DrafterGroup
from .trainable import TrainableDrafter
