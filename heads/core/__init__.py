"""What drafters and runtime share: the token tree, the slab cache, one tree forward, sampling."""

from .cache import LayerShape, SlabCache, probe_layers
from .errors import ArtifactError, HeadstartError, OptionError, UnsupportedTarget
from .forward import (
    FINAL,
    AttentionWindows,
    FeatureTap,
    output_layer,
    prefill_forward,
    tree_forward,
    tree_mask,
)
from .sampling import Sampling, gumbel, row_seeds, uniform
from .tree import TokenTree, Topology, ancestor_mask, parents_of_paths

__all__ = [
    "FINAL",
    "ArtifactError",
    "AttentionWindows",
    "FeatureTap",
    "HeadstartError",
    "LayerShape",
    "OptionError",
    "Sampling",
    "SlabCache",
    "TokenTree",
    "Topology",
    "UnsupportedTarget",
    "ancestor_mask",
    "gumbel",
    "output_layer",
    "parents_of_paths",
    "prefill_forward",
    "probe_layers",
    "row_seeds",
    "tree_forward",
    "tree_mask",
    "uniform",
]
