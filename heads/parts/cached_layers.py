"""A drafter's own model or layers, run over a cache of its own: on the text, and on a tree's nodes.

What is committed stands in the cache at its position, as in the target's. The nodes grown in a
round stand after it, each seeing the text and its ancestors; they are scratch: the next round
begins where the committed text ends, and writes over them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from ..core import (
    AttentionWindows,
    LayerShape,
    OptionError,
    PositionLimit,
    SlabCache,
    UnsupportedTarget,
    causal_run,
    choose_attention,
    in_steps,
    probe_layers,
    tree_run,
)
from ..core.triton_support import no_kernel

_ROOM = 512
"""Tokens beyond the prompt that the cache is first made for; later it grows by half."""


@dataclass
class DraftCache:
    """A request's state.

    Attributes:
        slab: keys and values; slot s of the committed text holds position s, and the nodes grown in
            this round stand after it.
        longest: a bound on any row's committed tokens, on the host.
        told: the largest root position, where the loop tells it before a round.
        lengths: [B] committed tokens.
        ancestors: [B, G, G] bool, of the nodes grown in this round; depth: [B, G], theirs.
    """

    slab: SlabCache
    longest: int
    lengths: Tensor
    told: int | None = None
    ancestors: Tensor = field(init=False)
    depth: Tensor = field(init=False)

    def reserve(self, slots: int) -> int:
        """Make room for so many slots a row; returns them rounded up, to be attended to."""
        live = in_steps(slots)
        if live > self.slab.capacity:
            grown = self.slab.capacity + self.slab.capacity // 2
            self.slab.reserve(max(live, in_steps(grown)))
        return live


@dataclass(frozen=True)
class ForwardSetup:
    """What the model's forwards need to know about it, and where that holds."""

    place: tuple[torch.device, torch.dtype]
    windows: AttentionWindows
    shapes: list[LayerShape]
    limit: PositionLimit | None


class CachedLayers:
    """Answers a drafter's calls with a model's forwards, and returns the model's own output.

    What the model reads is given by its own names, such as `input_ids` or `inputs_embeds`.

    Args:
        model: a causal language model, or decoder layers without embedding.
        shapes: what its layers cache, for layers of ours: they are known to heed a tree's mask.
            Any other model is tried, on one token and two small trees.
    """

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape] | None = None):
        self.model, self._shapes = model, shapes
        self._forward_setup: ForwardSetup | None = None

    def start(self, batch: int) -> DraftCache:
        """A fresh state, see `Drafter.start`."""
        lengths = torch.zeros(batch, dtype=torch.long, device=self.model.device)
        return DraftCache(SlabCache(self.forward_setup.shapes, batch, 0), 0, lengths)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        """See `Drafter.reserve`."""
        state.told = longest
        state.reserve(longest + 1 + room)

    def prefill(self, state: DraftCache, length: int, count: Tensor, **inputs: Tensor) -> None:
        """Run prompts [B, T], padded on the right, into an empty cache.

        Args:
            length: T, which may be 0; count: [B], true tokens of each row.

        Raises:
            OptionError: a prompt is longer than the model has positions.
        """
        limit = self.forward_setup.limit
        if limit is not None and length > limit.positions:
            raise OptionError(
                f"the longest prompt has {length} tokens and the draft model {limit.positions} "
                f"positions ({limit.reason}); shorten it, or use another drafter."
            )
        state.slab.clear()
        state.slab.reserve(in_steps(length + _ROOM))
        state.longest, state.lengths, state.told = length, count, None
        if not length:
            return
        options = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = 1  # nobody reads them
        causal_run(self.model, state.slab, inputs, **options)

    def begin(self, state: DraftCache, added: int, count: Tensor, **inputs: Tensor) -> Any:
        """Run what was just committed, [B, A]; from here on nodes are grown on it.

        Args:
            added: A; count: [B], true tokens of each row. What the padding writes lies behind the
                text, where this round's nodes are written.
        """
        longest = state.longest if state.told is None else state.told + 1
        live = state.reserve(longest + added)
        state.longest = longest + (added if state.told is None else 0)
        state.told = None
        steps = torch.arange(added, device=count.device)
        ancestors = (steps.unsqueeze(1) >= steps).expand(len(count), -1, -1)  # a chain
        depth = (steps + 1).expand(len(count), -1)
        found = self._run(state, inputs, depth, ancestors, live)
        state.lengths = state.lengths + count
        state.ancestors = ancestors[:, :0, :0]
        state.depth = depth[:, :0]
        return found

    def extend(self, state: DraftCache, parent: Tensor, **inputs: Tensor) -> Any:
        """Run W new nodes of the tree; `parent` [B, W] as in `Drafter.extend`."""
        width, grown = parent.shape[1], state.depth.shape[1]
        above = pad(state.ancestors, (0, 0, 1, 0))  # entry 0 is the root, which has none here
        above = above.gather(1, (parent + 1).unsqueeze(-1).expand(-1, -1, grown))  # [B, W, G]
        own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
        state.ancestors = torch.cat(
            [pad(state.ancestors, (0, width)), torch.cat([above, own], 2)], 1
        )  # [B, G+W, G+W]
        depth = pad(state.depth, (1, 0)).gather(1, parent + 1) + 1  # [B, W]
        state.depth = torch.cat([state.depth, depth], 1)
        live = state.reserve(state.longest + grown + width)
        return self._run(state, inputs, state.depth, state.ancestors, live)

    def _run(
        self,
        state: DraftCache,
        inputs: dict[str, Tensor],
        depth: Tensor,
        ancestors: Tensor,
        live: int,
    ) -> Any:
        """Run the last W of G nodes that stand after the committed text.

        Args:
            depth: [B, G], 1 at the first position after the text; ancestors: [B, G, G].
        """
        driven, lengths = self.forward_setup, state.lengths
        positions = lengths.unsqueeze(1) + depth - 1  # [B, G]
        if driven.limit is not None:
            # What is drafted past the limit is any token; it must only stay legal to run.
            positions = positions.clamp(max=driven.limit.positions - 1)
        return tree_run(
            self.model, state.slab, driven.windows, inputs, lengths, positions, ancestors, live
        )

    @property
    def forward_setup(self) -> ForwardSetup:
        """How the model is driven, found where it is and as it is."""
        model = self.model
        place = (model.device, model.dtype)
        if self._forward_setup is not None and self._forward_setup.place == place:
            return self._forward_setup
        try:
            windows = AttentionWindows.of(model)
            if self._shapes is None:
                shapes = probe_layers(model)
                windows = choose_attention(model, windows, shapes, "auto")
            else:
                device, dtype = place
                shapes = [replace(shape, device=device, dtype=dtype) for shape in self._shapes]
                sizes = [max(shape.key[1], shape.value[1]) for shape in shapes]
                slow = any(no_kernel(device, dtype, size) for size in sizes)
                windows = replace(windows, tree=not slow)
        except UnsupportedTarget as error:
            raise OptionError(f"no draft model: {error}") from error
        self._forward_setup = ForwardSetup(place, windows, shapes, PositionLimit.of(model))
        return self._forward_setup


def layer_like(target: PreTrainedModel) -> dict[str, Any]:
    """A Llama layer of the target's sizes, as the plain data of its config.

    Heads of public checkpoints are such layers, whatever their target is.
    """
    text = target.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    nested = next((value for value in rope.values() if isinstance(value, dict)), rope)
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": nested.get("rope_theta", 10_000.0),
    }


def own_layers(layer: dict[str, Any], count: int = 1) -> tuple[LlamaModel, list[LayerShape]]:
    """Decoder layers, read by `inputs_embeds` alone and without a final norm, and what they cache.

    Args:
        layer: see `layer_like`; may say more of what `LlamaConfig` knows, and `rope_scaling`.
    """
    sizes = {name: value for name, value in layer.items() if not name.startswith("rope_")}
    rope = {"rope_type": "default", **(layer.get("rope_scaling") or {})}
    rope["rope_theta"] = layer["rope_theta"]
    config = LlamaConfig(
        **sizes, vocab_size=1, num_hidden_layers=count, rope_parameters=rope,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = LlamaModel(config)
    del model.embed_tokens
    model.norm = nn.Identity()  # type: ignore[assignment]
    cached = layer["num_key_value_heads"], layer["head_dim"]
    return model, [LayerShape(torch.device("cpu"), torch.float32, cached, cached)] * count
