"""Whether a token tree can drive a model, and how: what it caches, attends by, and how far it goes.

Not every model of transformers heeds an explicit mask and explicit positions. Some number their
tokens by the length of the cache, some build a mask of their own (alibi), some read the mask in
another layout. Their logits on a tree differ from plain ones.
"""

import itertools
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .cache import SLOT_STEP, SlabCache
from .cache_name import CACHE
from .errors import MALFORMED, OptionError, UnsupportedTarget, brief, undrivable
from .features import eval_mode
from .forward import prefill_forward, tree_forward
from .layer_shape import LayerShape
from .masks import KEEPS_NOTHING, AttentionWindows
from .mixers import take_recurrent
from .offload import device_of
from .recurrent import RecurrentShape
from .tree import Topology
from .tree_attention import asks_for_attention

_LAYOUT = "in the layout of transformers"
_ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)
_RECURRENT_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Subclasses of these hold further states, so the exact type counts."""
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


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Find what each layer of a causal language model caches, by running one token.

    Recurrent layers, where it has any, run over slab caches from then on, see `take_recurrent`.

    Raises:
        UnsupportedTarget: a layer keeps a state of a kind that cannot be rolled back.
    """
    config = model.config.get_text_config(decoder=True)
    name, cache = config.model_type, DynamicCache(config=config)
    if cache.layers and all(type(layer) is LinearAttentionLayer for layer in cache.layers):
        raise undrivable(name, "attends nowhere, all of its layers are recurrent")
    with eval_mode(model):
        token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        try:
            model(input_ids=token, **{CACHE: cache}, use_cache=True)
        except torch.OutOfMemoryError:
            raise
        except MALFORMED as error:
            raise undrivable(name, f"cannot run over a cache ({brief(error)})") from error
    shapes, kinds = [], getattr(config, "layer_types", None)
    for index, layer in enumerate(cast("list[Any]", cache.layers)):
        attends, recurs = type(layer) in _ATTENTION_LAYERS, type(layer) in _RECURRENT_LAYERS
        alone = kinds is not None and kinds[index] in KEEPS_NOTHING
        if alone or type(layer).__name__ == "DummyLayer":  # it may read another layer's keys
            shapes.append(LayerShape(token.device, model.dtype))
            continue
        if not attends and not recurs:
            kept = f"keeps a {type(layer).__name__} at layer {index}, which cannot be rolled back"
            raise undrivable(
                name, f"{kept}; expected keys and values, or the state of a recurrence"
            )
        if recurs and layer.conv_states[0] is None:
            raise undrivable(name, f"caches no states {_LAYOUT}")
        state = _recurrent_shape(layer) if recurs else None
        if not attends:
            assert state is not None
            shapes.append(LayerShape(state.device, state.dtype, recurrent=state))
            continue
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.dim() != 4:
            raise undrivable(name, f"caches no keys and values at layer {index} {_LAYOUT}")
        key, value = ((states.shape[1], states.shape[3]) for states in (keys, values))
        shapes.append(LayerShape(keys.device, keys.dtype, key, value, state))
    if not any(shape.attends for shape in shapes):
        raise undrivable(name, f"caches no keys and values {_LAYOUT}")
    if recurrent := [index for index, shape in enumerate(shapes) if shape.recurrent]:
        take_recurrent(model, recurrent)
    return shapes


def _recurrent_shape(layer: Any) -> RecurrentShape:
    """What a layer keeps, as transformers' own cache has it after a token."""
    windows = [layer.conv_states[index] for index in sorted(layer.conv_states)]
    sizes = tuple((each.shape[1], each.shape[2]) for each in windows)
    state: Tensor | None = layer.recurrent_states[0]
    where = windows[0].device, windows[0].dtype
    if state is None:
        return RecurrentShape(*where, sizes)
    return RecurrentShape(*where, sizes, tuple(state.shape[1:]), state.dtype)


def choose_attention(
    model: PreTrainedModel,
    windows: AttentionWindows,
    shapes: list[LayerShape],
    attention: str,
    cacheless: bool = False,
) -> AttentionWindows:
    """Choose how a model attends to trees, by the trial of `check_tree`.

    Args:
        attention: `masked`, the model's own attention with an additive mask; `tree`, by
            `tree_attention`; `auto`, the latter where it has its kernel and passes the trial, else
            the former, with the reason in the log.
        cacheless: whether the model shall be given no cache, to be compiled; `tree` then.

    Raises:
        UnsupportedTarget: the trial failed.
    """
    if attention not in ATTENTION:
        raise OptionError(f"attention is {attention!r}; expected one of {', '.join(ATTENTION)}.")
    if attention != "masked":
        slow = next(filter(None, (shape.no_kernel for shape in shapes)), None)
        reason = _lost_softcap(model) or (slow if attention == "auto" else None)
        reason = (_read_elsewhere(model) if cacheless else None) or reason
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


def _read_elsewhere(model: PreTrainedModel) -> str | None:
    """Why a model cannot run without a cache, where layers read keys that others have cached."""
    config = model.config.get_text_config(decoder=True)
    if not (count := getattr(config, "num_kv_shared_layers", 0)):
        return None
    return f"{config.model_type} has {count} layers that read keys and values of others"


def check_tree(
    model: PreTrainedModel, windows: AttentionWindows, shapes: list[LayerShape]
) -> float:
    """Compare a tree forward with plain forwards of a few of its paths, on made-up tokens.

    Returns:
        The larger row's difference: the median over its compared nodes, so that one expert routed
        otherwise by rounding does not count, of the difference's standard deviation over the
        vocabulary, in units of the logits' own.

    Raises:
        UnsupportedTarget: the difference is more than rounding, or the tree forward fails.
    """
    config = model.config.get_text_config(decoder=True)
    parents = torch.tensor(_PARENTS, device=device_of(model))
    topology = Topology.from_parents(parents, max_depth=5)
    # From the middle of the vocabulary, away from special tokens.
    tokens = torch.arange(parents.numel(), device=parents.device) + config.vocab_size // 2
    tokens = (tokens % config.vocab_size).view_as(parents)  # [2, N]
    paths = tokens.gather(1, topology.paths[:, -_COMPARED:].flatten(1))  # [2, 3(D+1)]

    slots = parents.shape[1] + 2  # empty ones behind the tree, as in a round
    with eval_mode(model):
        plain = model(input_ids=paths.view(2 * _COMPARED, -1), use_cache=False).logits
        try:
            tree = tree_forward(
                model, SlabCache(shapes, 2, slots), windows, tokens, tokens.new_zeros(2),
                topology.depth, topology.ancestors, slots, None, topology,
            )[:, -_COMPARED:]  # fmt: skip
        except (torch.OutOfMemoryError, UnsupportedTarget):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = "cannot run a token tree"
            if windows.tree and not asks_for_attention(model, paths.view(2 * _COMPARED, -1)):
                reason = "has attention of its own and does not heed an explicit attention mask"
            raise undrivable(config.model_type, f"{reason} ({what})") from error
    last = topology.depth[:, -_COMPARED:].reshape(-1, 1, 1).expand(-1, 1, plain.shape[-1])
    plain = plain.gather(1, last).view_as(tree)  # [2, 3, V]
    difference = _difference(tree, plain)
    if difference > tolerance(plain.dtype):  # not so when NaN: that is for the loop to report
        raise undrivable(
            config.model_type,
            "does not heed an explicit attention mask and positions: its logits on a token tree "
            f"differ from plain ones by {difference:.2g} standard deviations",
        )
    if any(shape.recurrent for shape in shapes):
        difference = max(difference, _check_states(model, windows, shapes, tokens))
    return difference


def _difference(found: Tensor, plain: Tensor) -> float:
    """How far logits [B, M, V] are off, see `check_tree`."""
    error, size = (logits.float().std(-1) for logits in (found - plain, plain))  # over V: [B, M]
    return (error / size).median(1).values.max().item()


def _check_states(
    model: PreTrainedModel, windows: AttentionWindows, shapes: list[LayerShape], tokens: Tensor
) -> float:
    """Compare a tree, after prompts of two lengths and a committed path, with plain forwards.

    Args:
        tokens: [2, N] made-up ones, at least 14.

    Raises:
        UnsupportedTarget: the states after a prompt or a path are not what they should be.
    """
    counts, name = [7, 4], model.config.get_text_config(decoder=True).model_type
    slab = SlabCache(shapes, 2, SLOT_STEP)
    first = Topology.from_parents(tokens.new_tensor([[-1, 0, 0, 2]]), max_depth=2).expand(2)
    second = Topology.from_parents(tokens.new_tensor([[-1, 0, 1]]), max_depth=2).expand(2)
    path = tokens.new_tensor([[0, 2, 3], [0, 1, 1]])  # of the first tree
    lengths = tokens.new_tensor(counts)
    with eval_mode(model):
        prefill_forward(model, slab, tokens[:, :7], counts)
        for shape, nodes in ((first, tokens[:, 7:11]), (second, tokens[:, 11:14])):
            places = lengths.unsqueeze(1) + shape.depth
            found = tree_forward(
                model, slab, windows, nodes, lengths, places, shape.ancestors, SLOT_STEP,
                None, shape,
            )  # fmt: skip
            if shape is first:
                slab.commit(path)
                lengths = lengths + tokens.new_tensor([3, 2])
        plain = []
        for row, (count, nodes) in enumerate(zip(counts, ([7, 9, 10], [7, 8]), strict=True)):
            written = [tokens[row, :count], tokens[row, nodes], tokens[row, 11:14]]
            logits = model(input_ids=torch.cat(written).unsqueeze(0), use_cache=False).logits
            plain.append(logits[0, -3:])
    difference = _difference(found, torch.stack(plain))
    if difference > tolerance(model.dtype):
        raise undrivable(
            name,
            "has recurrent layers that do not keep what they should of a prompt or a tree: its "
            f"logits afterwards differ from plain ones by {difference:.2g} standard deviations",
        )
    return difference


def check_fused(
    model: PreTrainedModel, fused: AbstractContextManager[None], shapes: list[LayerShape]
) -> None:
    """Compare a model's forward with two within `fused`, on made-up tokens in a cache.

    By the first it is known which layers' writes may come early, see `fused_writes`.

    Raises:
        UnsupportedTarget: they differ by more than rounding, or cannot run.
    """
    config = model.config.get_text_config(decoder=True)
    ids = torch.arange(16, device=device_of(model)).view(2, -1) + config.vocab_size // 2
    ids = ids % config.vocab_size

    def logits(slab: SlabCache) -> Tensor:
        slots = torch.arange(8, device=ids.device).expand(2, -1)
        slab.set_slots(slots, 8)
        found = model(input_ids=ids, position_ids=slots, **{CACHE: slab}, use_cache=True)
        return found.logits.float()

    with eval_mode(model):
        plain = logits(SlabCache(shapes, 2, SLOT_STEP))
        slab = SlabCache(shapes, 2, SLOT_STEP)
        try:
            with fused:
                logits(slab)
            slab.clear()
            with fused:
                other = logits(slab)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = f"cannot run with fused layers ({what}); leave fused out"
            raise undrivable(config.model_type, reason) from error
    difference = ((other - plain).std(-1) / plain.std(-1)).median().item()
    if not difference <= tolerance(model.dtype):
        raise undrivable(
            config.model_type,
            f"computes other logits with fused layers, by {difference:.2g} standard deviations; "
            "leave fused out",
        )


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that passes for rounding, in standard deviations of the logits.

    Deep random models, which magnify it most, stay below 0.4 of that. Float32 has room for TF32.

    >>> [round(tolerance(dtype), 3) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    [0.01, 0.044, 0.125]
    """
    return max(0.01, (2 * torch.finfo(dtype).eps) ** 0.5)


class PositionLimit(NamedTuple):
    """How many positions a model has, and why no more."""

    positions: int
    reason: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """The limit of a model, None where there is none.

        Dynamic and longrope scaling change the frequencies of all tokens once the batch's longest
        text passes the trained length, so keys that are cached would be wrong: it is the limit.
        """
        config = model.config.get_text_config(decoder=True)
        longest: Any = getattr(config, "max_position_embeddings", None)
        if kept := getattr(config, "keep_window_size", None):
            return cls(kept, "beyond them its attention drops the tokens that it weighs least")
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            # Llama 4's, whose other layers scale queries by their place from `floor_scale` on.
            scaled = getattr(config, "attn_temperature_tuning", False)
            ends = [config.attention_chunk_size, *([config.floor_scale - 1] if scaled else [])]
            return cls(min(ends), "beyond them some of its layers see a chunk of the text alone")
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        for entry in nested or [parameters]:
            if (kind := entry.get("rope_type")) in ("dynamic", "longrope"):
                trained = kind == "longrope" and entry.get("original_max_position_embeddings")
                reason = f"beyond them {kind} rotary scaling turns what is cached already"
                return cls(trained or longest, reason)
        if longest is not None and _has_position_table(model, longest):
            return cls(longest, "its table of positions ends there")
        return None


def trained_context(model: PreTrainedModel) -> int | None:
    """How many tokens a model's config says that it was made for, rotary scaling counted in."""
    return declared_context(model.config)


def declared_context(config: PreTrainedConfig) -> int | None:
    """The `trained_context` of a model that has this config."""
    config = config.get_text_config(decoder=True)
    longest: Any = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        trained, factor = entry.get("original_max_position_embeddings"), entry.get("factor")
        if longest and trained and factor:
            longest = max(longest, int(trained * factor))
    return longest or None


def _has_position_table(model: PreTrainedModel, positions: int) -> bool:
    """Whether positions are looked up; some tables hold a few entries before position 0."""
    return any(
        tensor.dim() >= 2 and 0 <= tensor.shape[-2] - positions <= 2
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if "pos" in name or "wpe" in name
    )
