"""What drafters and runtime share: the token tree, the slab cache, one tree forward, sampling."""

from .cache import SlabCache, in_steps
from .errors import ArtifactError, DecodingError, HeadstartError, OptionError, UnsupportedTarget
from .features import FINAL, FeatureTap, capture, decoder_layers
from .forward import causal_run, prefill_forward, tree_forward, tree_run
from .layer_shapes import LayerShape, probe_layers
from .masks import tree_mask
from .noise import Stream, gumbel, place, row_seeds, uniform
from .offload import device_of, keep_resident, offloaded, streamed_from, weight_of
from .output import OutputLayer, output_layer
from .probe import ATTENTION, check_tree, choose_attention
from .processors import STATEFUL
from .sampling import Sampling, argmax, draw
from .topology import Topology, ancestor_mask
from .tree import TokenTree, parents_of_paths
from .windows import AttentionWindows, PositionLimit
