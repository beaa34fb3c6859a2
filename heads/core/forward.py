"""One forward of a token tree through any causal language model of transformers.

A 4-D additive mask and explicit positions drive the model, so no model code is touched. Used for
the target and for drafters that are language models themselves.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import pack_tree, tree_attention_on
from .cache import SlabCache
from .errors import OptionError, UnsupportedTarget
from .tree import Topology

FINAL = -1
"""Feature layer: the hidden state after the last norm, which the output layer reads."""

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_WINDOWS = {
    "moshi": "its masks leave out the window that its config declares",
    "gpt_neo": "it cuts its local attention by the length of the cache",
}
"""Models whose windows no explicit mask decides; a trial with a short text does not show it."""


@dataclass(frozen=True)
class AttentionWindows:
    """Which masks a model wants: one window for all layers, or one for each layer type.

    A window of w lets a query at position p see positions p - w + 1 … p; None sees everything.
    `tree` says that masks are packed trees, for tree attention; `cacheless`, that the model is then
    given no cache, which attention writes itself.
    """

    single: int | None
    by_type: dict[str, int | None] | None
    tree: bool = False
    cacheless: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionWindows:
        """Read the windows from a model's config; refuse, by name, what a tree cannot drive."""
        config = model.config.get_text_config(decoder=True)
        name = config.model_type
        if model.config.is_encoder_decoder:
            raise UnsupportedTarget(
                f"{model.config.model_type} is an encoder-decoder; a target is a decoder-only "
                "language model: decode it plainly, with model.generate."
            )
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise UnsupportedTarget(
                f"{name} runs attention as {implementation!r}; a token tree needs an explicit "
                "mask: call model.set_attn_implementation('sdpa')."
            )
        if reason := _OWN_WINDOWS.get(name):
            raise UnsupportedTarget(
                f"{name} does not heed an explicit attention mask: {reason}; decode it plainly, "
                "with model.generate."
            )
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        if not types:
            return cls(window, None)
        unknown = sorted(set(types) - _KNOWN_LAYER_TYPES)
        if unknown:
            raise UnsupportedTarget(
                f"{name} has layers of type {unknown[0]!r}; a token tree can drive only "
                f"{' and '.join(sorted(_KNOWN_LAYER_TYPES))}: decode it plainly, with "
                "model.generate."
            )
        windows = {kind: window if kind == "sliding_attention" else None for kind in types}
        if len(windows) == 1:
            return cls(next(iter(windows.values())), None)
        return cls(None, windows)


@dataclass(frozen=True)
class PositionLimit:
    """How many positions a model has, and why no more."""

    positions: int
    reason: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> PositionLimit | None:
        """The limit of a model, None where positions go on for ever.

        Dynamic and longrope scaling take other frequencies for all tokens once the batch's longest
        text passes the trained length; keys cached before, and rows beside it, would be off. Below
        that length they are fixed, so it is the limit.
        """
        config = model.config.get_text_config(decoder=True)
        longest: Any = getattr(config, "max_position_embeddings", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        for entry in nested or [parameters]:
            kind = entry.get("rope_type", "default")
            if kind in ("dynamic", "longrope"):
                trained = entry.get("original_max_position_embeddings") if kind[0] == "l" else None
                reason = f"beyond them {kind} rotary scaling turns what is cached already"
                return cls(trained or longest, reason)
        if longest is not None and _has_position_table(model, longest):
            return cls(longest, "its table of positions ends there")
        return None


def _has_position_table(model: PreTrainedModel, positions: int) -> bool:
    """Whether positions are looked up; some tables hold a few entries before position 0."""
    tables = itertools.chain(model.named_parameters(), model.named_buffers())
    return any(
        tensor.dim() >= 2 and 0 <= tensor.shape[-2] - positions <= 2
        for name, tensor in tables
        if "pos" in name or "wpe" in name
    )


def tree_mask(
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    live: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """The additive attention mask of a tree, whose nodes are written after the cached prefix.

    Args:
        lengths: [B] int64, cached tokens of each row; slot s of the prefix holds position s, and
            node n is written at slot length + n.
        positions: [B, N] int64, the position of each node.
        ancestors: [B, N, N] bool, see `ancestor_mask`.
        live: S, slots that the model attends to.
        dtype: the model's floating dtype.
        window: width of a sliding window, or None.

    Returns:
        [B, 1, N, S]: 0 where attention is allowed, the dtype's lowest value elsewhere.
    """
    batch, nodes, _ = ancestors.shape
    start = lengths.unsqueeze(1)  # [B, 1]
    slots = torch.arange(live, device=lengths.device)
    allowed = (slots < start).unsqueeze(1)  # [B, 1, S]
    if window is not None:
        oldest = positions.unsqueeze(-1) - window  # [B, N, 1]
        allowed = allowed & (slots > oldest)  # [B, N, S]
        ancestors = ancestors & (positions.unsqueeze(1) > oldest)
    own = (start + slots[:nodes]).unsqueeze(1).expand(-1, nodes, -1)  # [B, N, N]
    seen = allowed.expand(batch, nodes, live).scatter(2, own, ancestors)  # [B, N, S]
    return torch.where(seen.unsqueeze(1), *_bounds(dtype, lengths.device))


@cache
def _bounds(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros((), dtype=dtype, device=device),
        torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device),
    )


def tree_forward(
    model: PreTrainedModel,
    slab: SlabCache,
    windows: AttentionWindows,
    tokens: Tensor,
    *driving: Any,
) -> Tensor:
    """The logits [B, N, V], in the model's dtype, of nodes with these tokens [B, N]; `tree_run`."""
    return tree_run(model, slab, windows, {"input_ids": tokens}, *driving).logits


def tree_run(
    model: PreTrainedModel,
    slab: SlabCache,
    windows: AttentionWindows,
    inputs: dict[str, Tensor],
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    live: int,
    seen: int | None = None,
    shape: Topology | None = None,
    run: Callable[..., Any] | None = None,
) -> Any:
    """Run the last N of G tree nodes per row on top of the cached prefix, and of the other nodes.

    Args:
        inputs: what the model reads, by its own name: [B, N] `input_ids`, or `inputs_embeds`.
        lengths: [B] int64, cached tokens per row; node n is written at slot length + n.
        positions: [B, G] int64, each node's position: `lengths` + its depth.
        ancestors: [B, G, G] bool.
        live: slots to attend to, at least the longest row's length + G.
        seen: given where all rows have this length. Lone roots then need no mask, and the model
            does what it does when it decodes plainly.
        shape: what `ancestors` belong to, where all rows and many rounds share it.
        run: the model, compiled, where it is given no cache; as it is when None.

    Returns:
        The model's own output.
    """
    nodes = positions.shape[1]
    first = nodes - next(iter(inputs.values())).shape[1]
    attention_mask: Any = None
    if windows.tree:
        seen = None  # tree attention reads each row's length on the device, a lone root's too
    if seen is not None and nodes == 1:
        slab.set_slots(range(seen, seen + 1), seen + 1, seen)
    else:
        if seen is not None:
            slab.set_slots(range(seen + first, seen + nodes), live)
        else:
            numbers = torch.arange(first, nodes, device=lengths.device)
            slab.set_slots(lengths.unsqueeze(1) + numbers, live)

        def mask(window: int | None) -> Tensor:
            if seen is not None and shape is not None:
                return shifted_mask(shape, slab, seen, live, window)
            if windows.tree:
                whole = pack_tree(lengths, positions, ancestors, window)  # [B, 1, G, 2 + G]
            else:
                whole = tree_mask(lengths, positions, ancestors, live, slab.dtype, window)
            return whole[:, :, first:] if first else whole  # [B, 1, N, …]

        by_type = windows.by_type or {None: windows.single}
        masks = {kind: mask(window) for kind, window in by_type.items()}
        attention_mask = masks if windows.by_type else masks[None]
    driving = {
        "attention_mask": attention_mask,
        "position_ids": positions[:, first:] if first else positions,
    }
    if windows.cacheless:
        with tree_attention_on(model, slab):
            return (run or model)(**inputs, **driving, use_cache=False)
    with tree_attention_on(model) if windows.tree else nullcontext():
        return model(**inputs, **driving, past_key_values=slab, use_cache=True)


def shifted_mask(
    shape: Topology, slab: SlabCache, seen: int, live: int, window: int | None
) -> Tensor:
    """`tree_mask` of rows that all have length `seen`, [B, 1, N, S]: a view of a longer row's mask.

    Relative to its row's length a tree's mask is the same at every length, so one for C cached
    tokens, over twice as many slots, holds that of every shorter row, further to the right.
    """
    mask = shape.masks.get((window, slab.dtype))
    if mask is None or mask.shape[-1] < 2 * slab.capacity:
        lengths = torch.full_like(shape.depth[:1, 0], slab.capacity)  # [1]
        ends = slab.capacity + shape.depth[:1]  # [1, N]
        mask = tree_mask(lengths, ends, shape.ancestors[:1], 2 * slab.capacity, slab.dtype, window)
        shape.masks[window, slab.dtype] = mask
    mask = mask.narrow(-1, mask.shape[-1] // 2 - seen, live)
    if mask.device.type != "cpu":
        mask = mask.contiguous()  # kernels there want rows that begin at even addresses
    return mask if slab.batch == 1 else mask.expand(slab.batch, -1, -1, -1)


def prefill_forward(
    model: PreTrainedModel, slab: SlabCache, tokens: Tensor, counts: Sequence[int]
) -> Tensor:
    """Run prompts [B, T], padded on the right, into an empty cache; see `causal_run`.

    Args:
        tokens: [B, T] int64.
        counts: true tokens of each row, known on the host.

    Returns:
        Logits [B, V] after each row's last true token.
    """
    last = sorted({count - 1 for count in counts})
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = torch.tensor(last, device=tokens.device)
    logits = causal_run(model, slab, {"input_ids": tokens}, **options).logits
    column = [last.index(count - 1) if options else count - 1 for count in counts]
    rows = torch.arange(len(tokens), device=logits.device)
    return logits[rows, torch.tensor(column, device=logits.device)]  # [B, V]


def causal_run(
    model: PreTrainedModel, slab: SlabCache, inputs: dict[str, Tensor], **options: Any
) -> Any:
    """Run texts [B, T], padded on the right, into an empty cache; returns the model's own output.

    No mask is given: rows start at slot 0, so plain causal attention is right for every row and the
    model builds it as it always does; what the padding writes is overwritten later.

    Args:
        inputs: see `tree_run`; options: for the model's forward.
    """
    given = next(iter(inputs.values()))
    batch, length = given.shape[:2]
    positions = torch.arange(length, device=given.device).expand(batch, -1)
    slab.set_slots(range(length), length)
    return model(**inputs, position_ids=positions, past_key_values=slab, use_cache=True, **options)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a causal language model."""
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedTarget(
        f"{model.config.model_type} has no list of {wanted} decoder layers to take features from; "
        "use a drafter that reads only the final hidden state."
    )


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns the final hidden state into logits."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise UnsupportedTarget(
            f"{model.config.model_type} has no output layer that a drafter could read; a target "
            "needs get_output_embeddings()."
        )
    return cast(nn.Linear, layer)


class FeatureTap:
    """Captures hidden states of a model by hooks, while forwards run.

    Layer i ≥ 0 means the hidden state that enters decoder layer i; `FINAL` the one after the last
    norm. Hooks do not depend on the order of `output_hidden_states`, which differs by release.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self._captured: dict[int, Tensor] = {}
        self._order = tuple(layers)
        self._handles = []
        stack = decoder_layers(model) if any(layer != FINAL for layer in layers) else ()
        for layer in set(layers):
            if layer != FINAL and not 0 <= layer < len(stack):
                raise OptionError(
                    f"feature layer {layer} does not exist; expected 0 … {len(stack) - 1}, or "
                    f"{FINAL} for the final hidden state."
                )
            if layer == FINAL:
                hook = model.get_decoder().register_forward_hook(self._keep_output)
            else:
                keep = self._keep_input(layer)
                hook = stack[layer].register_forward_pre_hook(keep, with_kwargs=True)
            self._handles.append(hook)

    def _keep_output(self, module: nn.Module, args: tuple, output) -> None:
        self._captured[FINAL] = output[0]

    def _keep_input(self, layer: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def take(self) -> Tensor:
        """Features [B, T, F] of the last forward, F = layers × D, in the order asked for."""
        if len(self._order) == 1:
            return self._captured[self._order[0]]
        device = self._captured[self._order[0]].device
        return torch.cat([self._captured[layer].to(device) for layer in self._order], dim=-1)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
