"""A drafter's own model or layers, run over a cache of its own: on the text, and on a tree's nodes.

Committed tokens are cached at their positions, as in the target's cache. The nodes grown in a round
come after them and attend to the text and their ancestors; the next round overwrites them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..core import (
    AttentionWindows,
    LayerShape,
    OptionError,
    PositionLimit,
    SlabCache,
    UnsupportedTarget,
    causal_run,
    choose_attention,
    grow_lines,
    in_steps,
    probe_layers,
    tree_run,
)

_ROOM = 512
"""Tokens beyond the prompt that the cache is first made for; later it grows by half."""


@dataclass
class DraftCache:
    """The cache of one request: slot s of the committed text holds the keys and values of position
    s, and the slots after it those of the G nodes grown in this round.

    Attributes:
        prompt: slots of the longest prompt, where they are not those of the target's tokens.
    """

    scratch: ClassVar = ("lines", "hidden")

    slab: SlabCache
    lengths: Tensor  # [B] committed tokens
    longest: int = 0  # a bound on any row's committed tokens, the root included, on the host
    prompt: int | None = None
    lines: Tensor = field(init=False)  # [B, 1 + G, 2 + G] of `pack_tree`, the root's first
    hidden: Tensor = field(init=False)  # [B, 1 + G, D], states that EAGLE keeps, the root's first

    def reserve(self, slots: int) -> int:
        """Make room for so many slots a row; returns them rounded up, to be attended to."""
        live = in_steps(slots)
        if live > self.slab.capacity:
            self.slab.reserve(max(live, in_steps(self.slab.capacity * 3 // 2)))
        return live


class ForwardSetup(NamedTuple):
    """What forwards need to know of the model, and for which device and dtype of its first weight
    it holds."""

    place: tuple[torch.device, torch.dtype]
    windows: AttentionWindows
    shapes: list[LayerShape]
    limit: PositionLimit | None


class CachedLayers:
    """The drafter's calls as forwards of a model; each returns the model's own output.

    The model's inputs are given by its own names, `input_ids` or `inputs_embeds`.

    Args:
        model: a causal language model, or decoder layers without embedding.
        shapes: what its layers cache, for layers that are known to heed a tree's mask. When None
            that is found by trial, on one token and two small trees.
        tried: what is tried in place of layers without embedding, see `Readable`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: list[LayerShape] | None = None,
        tried: Any = None,
    ):
        self.model, self._shapes = model, shapes
        self._tried = model if tried is None else tried
        self._forward_setup: ForwardSetup | None = None

    def start(self, batch: int) -> DraftCache:
        """A fresh state, see `Drafter.start`."""
        lengths = torch.zeros(batch, dtype=torch.long, device=self.model.device)
        return DraftCache(SlabCache(self.forward_setup.shapes, batch, 0), lengths)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        """See `Drafter.reserve`."""
        state.longest = longest + 1
        state.reserve(state.longest + room)

    def prefill(self, state: DraftCache, count: Tensor, **inputs: Tensor) -> None:
        """Run prompts [B, T], padded on the right, of `count` [B] tokens into an empty cache.

        Raises:
            OptionError: a prompt is longer than the model has positions.
        """
        length = _length(inputs)
        self._empty(state, length, count)
        if length:
            causal_run(self.model, state.slab, inputs, kept=count)

    def _empty(self, state: DraftCache, length: int, count: Tensor) -> None:
        """Make a cache ready for prompts of `count` [B] tokens, at most `length`; see `prefill`."""
        limit = self.forward_setup.limit
        if limit is not None and length > limit.positions:
            raise OptionError(
                f"the longest prompt has {length} tokens and the draft model {limit.positions} "
                f"positions ({limit.reason}); shorten it, or use another drafter."
            )
        state.slab.clear()
        state.slab.reserve(in_steps(length + _ROOM))
        state.lengths = count

    def begin(self, state: DraftCache, count: Tensor, ahead: int = 0, **inputs: Tensor) -> Any:
        """Run what was just committed, [B, A], of which `count` [B] are true tokens of each row.

        Padding is cached after the text, where the nodes that are grown from here on overwrite it.

        Args:
            ahead: how many of the inputs, the last ones of A, follow the row's true tokens in a
                chain without being committed.
        """
        steps = torch.arange(_length(inputs), device=count.device)
        ancestors = (steps.unsqueeze(1) >= steps).expand(len(count), -1, -1)  # a chain
        place = steps.expand(len(count), -1)
        if ahead:
            later, rows = steps >= len(steps) - ahead, count.unsqueeze(1)
            seen = later | (steps < rows)  # [B, A], what those ahead may see
            ancestors = ancestors & (seen.unsqueeze(1) | ~later.unsqueeze(1))
            place = torch.where(later, place - (len(steps) - ahead) + rows, place)
        positions = state.lengths.unsqueeze(1) + place
        found = self._run(state, inputs, positions, ancestors, len(steps) - 1)
        if state.slab.recurrent is not None:
            state.slab.recurrent.commit(count - 1)
        state.lengths = state.lengths + count
        state.lines = pad(state.lengths.int().view(-1, 1, 1), (1, 0))  # the root sees the text
        return found

    def extend(self, state: DraftCache, parent: Tensor, **inputs: Tensor) -> Any:
        """Run W new nodes of the tree; `parent` [B, W] as in `Drafter.extend`."""
        state.lines, positions = grow_lines(state.lines, parent)
        lines = state.lines[:, 1:]  # [B, G + W, 2 + G + W]
        return self._run(state, inputs, positions, lines[..., 2:], 0, lines)

    def _run(
        self,
        state: DraftCache,
        inputs: dict[str, Tensor],
        positions: Tensor,
        ancestors: Tensor | Mapping[int | None, Tensor],
        levels: int | None = None,
        lines: Tensor | None = None,
    ) -> Any:
        """Run the last W of G nodes after the committed text.

        Args:
            positions: [B, G], the first node's is its row's length.
            ancestors: [B, G, G], or that by the layers' window.
            levels, lines: see `tree_run`.
        """
        setup = self.forward_setup
        live = state.reserve(state.longest + positions.shape[1])
        if setup.windows.tree:
            live = state.slab.capacity  # lengths are read on the device
        if setup.limit is not None:
            # Drafts past the limit are of no use; their positions must only be valid ones.
            positions = positions.clamp(max=setup.limit.positions - 1)
        return tree_run(
            self.model,
            state.slab,
            setup.windows,
            inputs,
            state.lengths,
            positions,
            ancestors,
            live,
            levels=levels,
            lines=lines,
        )

    @property
    def needs_length_bound(self) -> bool:
        """See `Drafter`: masks are as wide as the bound, and tree attention has none."""
        return not self.forward_setup.windows.tree

    @property
    def forward_setup(self) -> ForwardSetup:
        """How the model is run, found again whenever its device or dtype has changed."""
        model, setup = self.model, self._forward_setup
        weight = next(model.parameters())  # they are moved and cast together
        if setup is not None and setup.place == (weight.device, weight.dtype):
            return setup
        try:
            windows = AttentionWindows.of(model)
            if self._shapes is None:
                shapes = probe_layers(self._tried)
                windows = choose_attention(self._tried, windows, shapes, "auto")
            else:
                place = {"device": model.device, "dtype": model.dtype}
                shapes = [replace(shape, **place) for shape in self._shapes]
                windows = replace(windows, tree=not any(shape.no_kernel for shape in shapes))
        except UnsupportedTarget as error:
            raise OptionError(f"no draft model: {error}") from error
        place = weight.device, weight.dtype
        self._forward_setup = ForwardSetup(place, windows, shapes, PositionLimit.of(model))
        return self._forward_setup


def _length(inputs: dict[str, Tensor]) -> int:
    """T of a model's only input, [B, T] or [B, T, D]."""
    return next(iter(inputs.values())).shape[1]
