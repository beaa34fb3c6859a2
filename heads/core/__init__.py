"""What drafters and runtime share: the token tree, the slab cache, one tree forward, sampling."""

from .cache import LayerShape, SlabCache, in_steps, probe_layers
from .errors import ArtifactError, DecodingError, HeadstartError, OptionError, UnsupportedTarget
from .forward import (
    FINAL,
    AttentionWindows,
    FeatureTap,
    PositionLimit,
    causal_run,
    output_layer,
    prefill_forward,
    tree_forward,
    tree_mask,
    tree_run,
)
from .offload import device_of, keep_resident, offloaded, streamed_from, weight_of
from .probe import ATTENTION, check_tree, choose_attention
from .sampling import STATEFUL, Sampling, Stream, argmax, draw, gumbel, place, row_seeds, uniform
from .tree import TokenTree, Topology, ancestor_mask, parents_of_paths

__all__ = [
    "ATTENTION",
    "FINAL",
    "STATEFUL",
    "ArtifactError",
    "AttentionWindows",
    "DecodingError",
    "FeatureTap",
    "HeadstartError",
    "LayerShape",
    "OptionError",
    "PositionLimit",
    "Sampling",
    "SlabCache",
    "Stream",
    "TokenTree",
    "Topology",
    "UnsupportedTarget",
    "ancestor_mask",
    "argmax",
    "causal_run",
    "check_tree",
    "choose_attention",
    "device_of",
    "draw",
    "gumbel",
    "in_steps",
    "keep_resident",
    "offloaded",
    "output_layer",
    "parents_of_paths",
    "place",
    "prefill_forward",
    "probe_layers",
    "row_seeds",
    "streamed_from",
    "tree_forward",
    "tree_mask",
    "tree_run",
    "uniform",
    "weight_of",
]
