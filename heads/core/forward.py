"""Forwards of a causal language model of transformers over a slab cache: token trees and prompts.

A 4-D mask and explicit positions drive the model, so its code is not changed. Used for the target
and for drafters that are language models or decoder layers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import masks
from .cache import SlabCache
from .cache_name import CACHE
from .few_rows import few_rows
from .masks import AttentionWindows
from .packing import runs_packed
from .recurrent import TreeRun, parents_of
from .tree import Topology
from .tree_attention import tree_attention_on
from .tree_lines import pack_tree


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
    ancestors: Tensor | Mapping[int | None, Tensor],
    live: int,
    seen: int | None = None,
    shape: Topology | None = None,
    run: Callable[..., Any] | None = None,
    levels: int | None = None,
    lines: Tensor | None = None,
) -> Any:
    """Run the last N of G tree nodes a row on the cached prefix and the others: the model's output.

    Args:
        inputs: what the model reads, by its own name: [B, N] `input_ids`, or `inputs_embeds`.
        lengths, ancestors: see `tree_mask`; the latter perhaps as integers, or by the layers'
            window.
        positions: [B, G] int64, each node's position: `lengths` + its depth.
        live: slots to attend to, at least the longest row's length + G.
        seen: given where all rows have this length. Lone roots then need no mask, and the model
            does what it does when it decodes plainly.
        shape: what `ancestors` belong to, where it is at hand.
        run: the model, compiled, where it is given no cache; as it is when None.
        levels: how many of a node's ancestors are among the N at most, where it is known.
        lines: [B, G, 2 + G] int32, what `pack_tree` makes of the tree without a window, where it is
            at hand.
    """
    nodes = positions.shape[1]
    first = nodes - next(iter(inputs.values())).shape[1]
    if slab.recurrent is not None:
        assert isinstance(ancestors, Tensor)
        ancestors = ancestors.bool()
        parents = parents_of(ancestors, positions) if shape is None else shape.parents
        deepest = nodes - 1 if shape is None else shape.max_depth
        levels = deepest if levels is None else levels
        slab.recurrent.run_tree(TreeRun(parents, ancestors, first, levels))
    driving: dict[str, Any] = {"position_ids": positions[:, first:] if first else positions}
    if windows.tree:
        seen = None  # tree attention reads each row's length on the device, a lone root's too
    if seen is not None and nodes == 1:
        slab.set_slots(range(seen, seen + 1), seen + 1, seen)
    else:
        if seen is not None:
            slab.set_slots(range(seen + first, seen + nodes), live)
        else:
            alone = nodes - first == 1
            numbers = first if alone else torch.arange(first, nodes, device=lengths.device)
            slab.set_slots(lengths.unsqueeze(1) + numbers, live)

        def mask(window: int | None) -> Tensor:
            own = ancestors if isinstance(ancestors, Tensor) else ancestors[window]
            if seen is not None and shape is not None and shape.children is not None:
                return masks.shifted_mask(shape, slab, seen, live, window)
            if windows.tree and window is None and lines is not None:
                whole = lines.unsqueeze(1)  # [B, 1, G, 2 + G]
            elif windows.tree:
                whole = pack_tree(lengths, positions, own, window)
            else:
                whole = masks.tree_mask(lengths, positions, own.bool(), live, slab.dtype, window)
            return whole[:, :, first:] if first else whole  # [B, 1, N, …]

        found: Any = windows.masks(mask)
        if windows.without_masks:
            found |= dict.fromkeys(windows.without_masks)
        driving["attention_mask"] = found
    if windows.cacheless:
        with tree_attention_on(slab):
            return (run or model)(**inputs, **driving, use_cache=False)
    with attending(model, windows):
        return model(**inputs, **driving, **{CACHE: slab}, use_cache=True)


def attending(model: PreTrainedModel, windows: AttentionWindows) -> AbstractContextManager[None]:
    """How a model attends to trees over a cache, for one forward of this thread."""
    if windows.tree:
        return tree_attention_on()
    return few_rows() if runs_packed(model) else nullcontext()


def prefill_forward(
    model: PreTrainedModel,
    slab: SlabCache,
    tokens: Tensor,
    counts: Sequence[int],
    kept: Sequence[int] | None = None,
    first: int = 0,
) -> Tensor:
    """Run prompts [B, T] as `causal_run` does: logits [B, V] after each row's last true token.

    Args:
        counts: true tokens of each row, known on the host.
        kept: so many of them shall recurrent layers keep; all when None.
        first: see `causal_run`.
    """
    last = sorted({count - 1 for count in counts})
    keep = torch.tensor(last, device=tokens.device)
    own = counts if kept is None else kept
    padded = any(count < tokens.shape[1] for count in own)
    inputs, own = {"input_ids": tokens}, own if padded else None
    logits = causal_run(model, slab, inputs, keep, own, first).logits
    kept = last if logits.shape[1] == len(last) else range(tokens.shape[1])
    column = torch.tensor([kept.index(count - 1) for count in counts], device=logits.device)
    return logits[torch.arange(len(tokens), device=logits.device), column]  # [B, V]


def causal_run(
    model: PreTrainedModel,
    slab: SlabCache,
    inputs: dict[str, Tensor],
    keep: int | Tensor = 1,
    kept: Sequence[int] | Tensor | None = None,
    first: int = 0,
) -> Any:
    """Run texts [B, T], padded on the right, into an empty cache; returns the model's own output.

    No mask is given: rows start at one slot, so plain causal attention is right for every row and
    the model builds it as it always does; what the padding writes is overwritten later.

    Args:
        inputs: see `tree_run`.
        keep: the columns, or how many of the last, to compute logits of, where the model can tell.
        kept: so many tokens of each row shall recurrent layers keep; all when None.
        first: the slot that rows start at, after what is cached of all of them.
    """
    given = next(iter(inputs.values()))
    batch, length = given.shape[:2]
    positions = torch.arange(first, first + length, device=given.device).expand(batch, -1)
    slab.set_slots(range(first, first + length), first + length, first)
    if slab.recurrent is not None:
        slab.recurrent.run_prompts(kept)
    knows = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": keep} if knows else {}
    options[CACHE] = slab
    return model(**inputs, position_ids=positions, use_cache=True, **options)
