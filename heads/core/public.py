"""Names of `core` whose modules import torch; the package imports this file on first use."""

from .before import Before, CountPenalty, penalise, repeating
from .best import best_log_probabilities, best_of
from .cache import SlabCache, in_steps
from .cache_name import CACHE, CACHE_NAMES
from .cpu_kernels import CpuLinear, each_product, use_huge_pages
from .features import (
    FeatureTap,
    OutputLayer,
    capture,
    decoder_layers,
    decoder_of,
    finish_of_sharded,
    logit_factor,
    output_layer,
    output_rows,
)
from .forward import attending, causal_run, prefill_forward, tree_forward, tree_run
from .fused import FusedLayers, has_kernels_for
from .layer_shape import LayerShape
from .machine import (
    free_bytes,
    has_bfloat16,
    physical_cores,
    release_threads,
    said_of_busy_cores,
    total_bytes,
    use_physical_cores,
)
from .masks import AttentionWindows, tree_mask
from .noise import Stream, gumbel, place, row_seeds, uniform
from .offload import (
    current,
    device_and_dtype,
    device_of,
    gathered,
    in_shards,
    keep_resident,
    offloaded,
    streamed_from,
    weight_of,
)
from .packing import (
    OnlyPacked,
    PackedLinear,
    Packing,
    copy_fits,
    layers_run_by,
    mark_packed,
    packing_pays,
    runs_by_kernels,
    runs_packed,
)
from .prefetch import Prefetch, alone, run_streamed
from .pretrained import (
    causal_class,
    end_tokens,
    language_model_in,
    load_pretrained,
    loaded_whole,
    read_weights,
)
from .probe import (
    ATTENTION,
    PositionLimit,
    check_fused,
    check_tree,
    choose_attention,
    declared_context,
    probe_layers,
    trained_context,
)
from .row_settings import Biased, RowSettings, note_rows, processors_by_row, write_rows
from .sampling import STATEFUL, Sampling, argmax, draw
from .tensor_parallel import (
    in_parts,
    options_in_parts,
    processes_of,
    way_refused,
    whole_plan,
)
from .time_limit import within
from .tree import TokenTree, Topology, ancestor_mask
from .tree_lines import grow_lines
from .whole_model import take_whole_models
