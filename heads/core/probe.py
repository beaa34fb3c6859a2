"""Whether a token tree can drive a model, and how: found by running two small trees.

Not every model of transformers heeds an explicit mask and explicit positions. Some number their
tokens by the length of the cache, some build a mask of their own (alibi), some read the mask in
another layout. Their logits on a tree differ from plain ones.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import SlabCache
from .errors import OptionError, UnsupportedTarget, undrivable
from .eval_mode import eval_mode
from .forward import tree_forward
from .layer_shapes import LayerShape
from .offload import device_of
from .topology import Topology
from .triton_support import no_kernel
from .windows import AttentionWindows

_PARENTS = [
    [-1, *[0] * 12, 12, 12, 13],  # twelve siblings, and three nodes under the last
    [-1, 0, 1, 2, *[0] * 8, 3, 3, 12, 12],  # a chain, siblings of its first node, then its end
]
"""Two rows with different masks and positions, whose last nodes are far from their ancestors'
slots: the logits of a model that attends to all, or counts slots, differ most there."""
_COMPARED = 3
"""The last nodes of each row are compared with plain forwards of their paths."""


ATTENTION = ("auto", "masked", "tree")
"""How a tree's forward attends; see `choose_attention`."""

logger = logging.getLogger(__name__)


def choose_attention(
    model: PreTrainedModel,
    windows: AttentionWindows,
    shapes: list[LayerShape],
    attention: str,
    cacheless: bool = False,
) -> AttentionWindows:
    """Choose how a model attends to trees, by the trial of `check_tree`.

    Args:
        attention: `masked`, the model's own attention with an additive mask; `tree`, tree
            attention, see `tree_attention`; `auto`, the latter where it has its kernel and passes
            the trial, else the former, with the reason in the log.
        cacheless: whether the model shall be given no cache, to be compiled; `tree` then.

    Returns:
        The windows that `tree_forward` takes.

    Raises:
        UnsupportedTarget: the trial failed.
    """
    if attention not in ATTENTION:
        raise OptionError(f"attention is {attention!r}; expected one of {', '.join(ATTENTION)}.")
    if attention != "masked":
        layers = {(s.device, s.dtype, max(s.key[1], s.value[1])) for s in shapes}
        slow = next((reason for layer in layers if (reason := no_kernel(*layer))), None)
        reason = _lost_softcap(model) or (slow if attention == "auto" else None)
        if reason is None:
            packed = replace(windows, tree=True, cacheless=cacheless)
            try:
                check_tree(model, packed, shapes)
                return packed
            except UnsupportedTarget as error:
                reason = str(error).partition(";")[0]
        if attention == "tree":
            way = "leave compile out" if cacheless else "use attention='masked'"
            raise UnsupportedTarget(f"{reason}; tree attention cannot drive it: {way}.")
        logger.info("No tree attention, but masks: %s.", reason)
    check_tree(model, windows, shapes)
    return windows


def _lost_softcap(model: PreTrainedModel) -> str | None:
    """Why tree attention would differ from the model's own, where that leaves out the softcap."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa" or not getattr(config, "attn_logit_softcapping", None):
        return None
    return (
        f"{config.model_type} runs as sdpa, which knows no softcap of scores: "
        "model.set_attn_implementation('eager') gives it back"
    )


def check_tree(
    model: PreTrainedModel, windows: AttentionWindows, shapes: list[LayerShape]
) -> float:
    """Compare a tree forward with plain forwards of a few of its paths, on made-up tokens.

    Two forwards, of 2 × 16 and 6 × 6 tokens. A node's difference is the standard deviation over the
    vocabulary of the difference, in units of its logits' standard deviation; a row's is the median
    over its compared nodes, so that one expert routed otherwise by rounding does not count.

    Returns:
        The larger row's difference.

    Raises:
        UnsupportedTarget: the difference is more than rounding, or the tree forward fails.
    """
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    parents = torch.tensor(_PARENTS, device=device_of(model))
    topology = Topology.from_parents(parents, max_depth=5)
    # From the middle of the vocabulary, away from special tokens.
    tokens = torch.arange(parents.numel(), device=parents.device) + config.vocab_size // 2
    tokens = (tokens % config.vocab_size).view_as(parents)  # [2, N]
    paths = tokens.gather(1, topology.paths[:, -_COMPARED:].flatten(1))  # [2, 3(D+1)]

    slots = (2, parents.shape[1] + 2)  # empty ones behind the tree, as in a round
    with eval_mode(model):
        plain = model(input_ids=paths.view(2 * _COMPARED, -1), use_cache=False).logits
        try:
            tree = tree_forward(
                *(model, SlabCache(shapes, *slots), windows, tokens, tokens.new_zeros(2)),
                *(topology.depth, topology.ancestors, slots[1]),
            )[:, -_COMPARED:]
        except (torch.OutOfMemoryError, UnsupportedTarget):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise undrivable(name, f"cannot run a token tree ({what})") from error
    last = topology.depth[:, -_COMPARED:].reshape(-1, 1, 1).expand(-1, 1, plain.shape[-1])
    plain = plain.gather(1, last).view_as(tree)  # [2, 3, V]
    difference = (_spread(tree - plain) / _spread(plain)).median(1).values.max().item()
    if difference > tolerance(plain.dtype):  # not so when NaN: that is for the loop to report
        raise undrivable(
            name,
            "does not heed an explicit attention mask and positions: its logits on a token tree "
            f"differ from plain ones by {difference:.2g} standard deviations",
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
