"""Whether a token tree can drive a model: asked once, by running two small trees.

Not every model of transformers heeds an explicit mask and explicit positions. Some number their
tokens by what the cache holds, some build a mask of their own (alibi), some unpack the mask in
another layout. Their tree logits differ from plain ones, whatever their names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import LayerShape, SlabCache
from .errors import UnsupportedTarget
from .forward import AttentionWindows, tree_forward
from .tree import Topology

_PARENTS = [
    [-1, *[0] * 12, 12, 12, 13],  # twelve siblings, and three nodes under the last
    [-1, 0, 1, 2, *[0] * 8, 3, 3, 12, 12],  # a chain, siblings of its first node, then its end
]
"""Two rows that share neither mask nor positions, and whose last nodes stand far from the slots of
their ancestors: a model that sees everything, or counts slots, is far off there."""
_COMPARED = 3
"""The last nodes of each row are compared with plain forwards of their paths."""


def check_tree(
    model: PreTrainedModel, windows: AttentionWindows, shapes: list[LayerShape]
) -> float:
    """Compare a tree forward with plain forwards of a few of its paths, on made-up tokens.

    Two forwards, of 2 × 16 and 6 × 6 tokens. The difference of a node is the standard deviation,
    over the vocabulary, of what differs, in units of its logits' standard deviation; a row's is the
    median over its compared nodes, lest an expert that rounding routes otherwise counts.

    Returns:
        The larger row's difference.

    Raises:
        UnsupportedTarget: the difference is more than rounding, or the tree forward fails.
    """
    config = model.config.get_text_config(decoder=True)
    parents = torch.tensor(_PARENTS, device=model.device)
    topology = Topology.from_parents(parents, max_depth=5)
    # From the middle of the vocabulary, away from special tokens.
    tokens = torch.arange(parents.numel(), device=model.device) + config.vocab_size // 2
    tokens = (tokens % config.vocab_size).view_as(parents)  # [2, N]
    paths = tokens.gather(1, topology.paths[:, -_COMPARED:].flatten(1))  # [2, 3(D+1)]

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            plain = model(input_ids=paths.view(2 * _COMPARED, -1), use_cache=False).logits
            tree = _tree_logits(model, windows, shapes, tokens, topology)[:, -_COMPARED:]
    finally:
        model.train(was_training)
    last = topology.depth[:, -_COMPARED:].reshape(-1, 1, 1).expand(-1, 1, plain.shape[-1])
    plain = plain.gather(1, last).view_as(tree)  # [2, 3, V]
    difference = (_spread(tree - plain) / _spread(plain)).median(1).values.max().item()
    if difference > tolerance(plain.dtype):  # not so when NaN: that is for the loop to report
        raise UnsupportedTarget(
            f"{config.model_type} does not heed an explicit attention mask and positions: its "
            f"logits on a token tree differ from plain ones by {difference:.2g} standard "
            "deviations; such a model can only be decoded plainly, with model.generate."
        )
    return difference


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that passes for rounding, in standard deviations of the logits.

    Deep random models, which magnify rounding more than trained ones, stay below 0.4 of it.
    Float32 gets room for the ten bits of TF32.

    >>> [round(tolerance(dtype), 3) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    [0.01, 0.044, 0.125]
    """
    return max(0.01, (2 * torch.finfo(dtype).eps) ** 0.5)


def _spread(logits: Tensor) -> Tensor:
    """The standard deviation over the vocabulary, [..., V] -> [...]."""
    return logits.float().std(-1)


def _tree_logits(
    model: PreTrainedModel,
    windows: AttentionWindows,
    shapes: list[LayerShape],
    tokens: Tensor,
    topology: Topology,
) -> Tensor:
    rows, nodes = tokens.shape
    live = nodes + 2  # empty slots behind the tree, as in a round
    slab = SlabCache(shapes, rows, live)
    lengths = tokens.new_zeros(rows)
    try:
        return tree_forward(
            model, slab, windows, tokens, lengths, topology.depth, topology.ancestors, live
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedTarget(
            f"{model.config.model_type} cannot run a token tree ({type(error).__name__}: "
            f"{reason}); such a model can only be decoded plainly, with model.generate."
        ) from error
