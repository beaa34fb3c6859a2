"""Drives a target model: prefill, verify a tree in one forward, commit the accepted path."""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import DrafterGroup, OptionError, SlabCache, TokenTree, UnsupportedTarget
from headstart.heads.core import (
    AttentionWindows,
    FeatureTap,
    FusedLayers,
    LayerShape,
    Packing,
    PositionLimit,
    check_fused,
    choose_attention,
    copy_fits,
    device_of,
    has_kernels_for,
    in_parts,
    in_steps,
    layers_run_by,
    offloaded,
    packing_pays,
    prefill_forward,
    probe_layers,
    run_streamed,
    runs_by_kernels,
    runs_packed,
    take_whole_models,
    tree_forward,
    way_refused,
)

from .capture import unwatched

logger = logging.getLogger(__name__)

PACKED, AUTO = "packed", "auto"
MODES = (PACKED, "default", "max-autotune-no-cudagraphs")
"""Ways to compile: packed weights, or the modes of `torch.compile` that capture no graphs."""


def way_to_run(model: PreTrainedModel, compile: bool | str, in_place: bool = False) -> str | None:
    """The one of `MODES` that is asked for, by name or by what suits the device; None for none.

    `auto` is packed weights on a CPU, where a short trial finds them faster and a copy that is not
    `in_place` fits into memory, and none elsewhere.
    """
    if compile is False or (compile == AUTO and in_parts(model)):
        return None
    if in_parts(model):
        raise way_refused("compile", compile)
    mode = compile
    if mode == AUTO:
        here, packed = device_of(model).type == "cpu", runs_packed(model)
        pays = packed or (here and (in_place or copy_fits(model)) and packing_pays(model))
        return PACKED if here and pays else None
    if mode is True:
        mode = PACKED if device_of(model).type == "cpu" else "default"
    if mode not in MODES:
        raise OptionError(
            f"compile is {mode!r}; expected True, False, auto, packed, or a mode of torch.compile "
            f"that captures no graphs: {' or '.join(MODES[1:])}."
        )
    return mode


def _compiled(model: PreTrainedModel, mode: str, attention: str) -> Callable[..., Any]:
    """A model's forward, compiled for the shapes that it meets; hooks of its parts run in it."""
    if attention == "masked":
        raise OptionError(
            "compile with attention='masked': its masks grow with the text, and each would be "
            "compiled anew; leave attention out."
        )

    def run(**inputs: Any) -> Any:
        return model(**inputs)

    # What is compiled is kept by code, and its guards overlook hooks: with code of its own, a
    # target never meets what was compiled for another one's features. And each shape has its own,
    # since torch compiles the same code for eight of them at most, and runs others as they are.
    compiled: dict[torch.Size, Callable[..., Any]] = {}

    def call(**inputs: Any) -> Any:
        shape = inputs["input_ids"].shape
        if shape not in compiled:
            own = FunctionType(run.__code__.replace(), globals(), closure=run.__closure__)
            compiled[shape] = torch.compile(own, dynamic=False, mode=mode)
        with unwatched():  # it reads the model's weights, and what the round has just made
            return compiled[shape](**inputs)

    return call


@torch.inference_mode(False)  # what is computed beforehand is known by its version
@torch.no_grad()
def _fused_layers(
    model: PreTrainedModel, shapes: list[LayerShape], asked: bool | None
) -> FusedLayers | None:
    """Fused layers where they are asked for, or a model runs packed here and they do the same; or,
    if nothing is asked, where a model is on one GPU that has kernels for them, and they do."""
    packed = runs_packed(model) and device_of(model).type == "cpu"  # it may have been moved since
    wanted = asked or packed or (asked is None and has_kernels_for(model))
    if not wanted:
        return None
    fused = FusedLayers(model)
    try:
        check_fused(model, fused, shapes)
    except UnsupportedTarget as error:
        if asked:
            raise
        logger.info("No fused layers: %s", error)
        return None
    if packed:
        fused.found["whole layers"] = take_whole_models(model)
    return fused


class KeptPrompt:
    """A prompt that has run: its tokens [T], its features [1, T, F], and a cache of one row, which
    holds its keys and values as long as the cache's contents are the same."""

    def __init__(self, tokens: Tensor, features: Tensor, slab: SlabCache):
        self.tokens, self.features, self.slab = tokens, features, slab
        self._contents = slab.contents

    def begins(self, tokens: Tensor) -> int:
        """How many tokens another prompt [T'] begins with that are cached; its last one is run."""
        if self.slab.contents is not self._contents:
            return 0
        most = min(len(self.tokens), len(tokens) - 1)
        return int((self.tokens[:most] == tokens[:most]).cumprod(0).sum())

    def before(self, features: Tensor, known: int) -> Tensor:
        """The features of whole prompts, of which the first `known` tokens are this one's and the
        others have features [R, T', F]."""
        first = self.features[:, :known].expand(len(features), -1, -1)
        return torch.cat([first, features], 1)  # [R, known + T', F]


class Target:
    """A causal language model of transformers, whose cache can be rolled back, as rounds call it.

    Args:
        feature_layers: the hidden states to capture, see `FeatureTap`; empty for none.
        attention: how trees attend, see `choose_attention`.
        compile: whether forwards are made faster, or how, one of `MODES`. True is `packed` on a
            CPU: linear layers run on packed weights, see `Packing`. Elsewhere forwards over trees
            are compiled by `torch.compile`, once for each shape, and attend by tree attention;
            prompts run as they are.
        fused: whether forwards over trees run with `FusedLayers`; those of a packed model do. None:
            on one GPU, in the types that it has kernels for. Of forwards that `torch.compile`
            compiles, only the products are: it makes kernels of the rest itself.

    Attributes:
        model: the model that was given; runner: what its forwards run, itself or a packed copy.
        kernels: whether layers run by the kernels for CPUs.
        keeps_prompts: whether prompts that begin as the last one are not run whole, see `prefill`.
        kept_tokens: so many tokens of the last prompt were not run.

    Raises:
        OptionError: a mode that captures graphs itself, or masked attention to be compiled.
        UnsupportedTarget: the model cannot be driven by a token tree; the message names why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        attention: str = "auto",
        compile: bool | str = False,
        fused: bool | None = None,
    ):
        mode = way_to_run(model, compile)
        self.model, self.compile = model, (mode or False) if compile == AUTO else compile
        self._packing = Packing() if mode == PACKED else None
        inductor = mode if mode != PACKED else None
        self._run = _compiled(model, inductor, attention) if inductor else None
        if self._packing is not None:
            model = self._packing.copy(model)
        self.runner = model  # the model that forwards run
        self.kernels = runs_by_kernels(model)
        windows = AttentionWindows.of(model)
        self.shapes = probe_layers(model)
        self.windows = choose_attention(
            model, windows, self.shapes, "tree" if inductor else attention, bool(inductor)
        )
        self.tap = FeatureTap(model, feature_layers, listens=False) if feature_layers else None
        if self.tap is not None:
            weakref.finalize(self, self.tap.close)
        self.fused = _fused_layers(model, self.shapes, fused)
        self._streamed = offloaded(model)
        self.cache = SlabCache(self.shapes, 0, 0)
        self.limit = PositionLimit.of(model)  # no row may run past it; None without an end
        self.keeps_prompts, self.kept_tokens = False, 0
        self._kept: KeptPrompt | None = None  # in the cache
        self._kept_apart: KeptPrompt | None = None  # in one of `prefill_apart`

    def __repr__(self) -> str:
        kind, dtype = type(self.model).__name__, str(self.model.dtype).removeprefix("torch.")
        return f"Target({kind}, {dtype}, {self.device}, forwards by {self.forwards})"

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def vocabulary(self) -> int:
        """How many token ids there are, by the embedding or the config, whichever has more."""
        embedding: Any = self.model.get_input_embeddings()
        return max(embedding.weight.shape[0], self.model.config.get_text_config().vocab_size)

    @property
    def forwards(self) -> str:
        """What forwards run by, as reports name it, such as `kernels`; `torch` for nothing else."""
        if self._run:
            return "compiled forwards"
        return layers_run_by(self.runner) or ("fused layers" if self.fused else "torch")

    def drafters_to_run(self, drafters: DrafterGroup) -> DrafterGroup:
        """The drafters themselves, or copies of them that run packed as the target does."""
        if self._packing is None:
            return drafters
        packed = [self._packing.copy(each) for each in drafters.drafters]
        for each in packed:
            take_whole_models(each)
        return DrafterGroup(packed)

    def prefill(
        self, tokens: Tensor, counts: Sequence[int], capacity: int
    ) -> tuple[Tensor, Tensor]:
        """Run prompts into an empty cache with at least `capacity` slots a row.

        Where it `keeps_prompts`, a single one runs from the token on in which it differs from the
        last one, whose keys and values are cached still.

        Args:
            tokens: [B, T] int64, padded on the right; counts: true ones of each row.

        Returns:
            Logits [B, V] after each row's last token, and features [B, T, F].
        """
        slots, alone = in_steps(max(capacity, tokens.shape[1])), len(tokens) == 1
        kept, self._kept = self._kept, None
        known = kept.begins(tokens[0]) if alone and kept is not None else 0
        if kept is not None and known:
            self.keep(known, slots)
            logits, features = self.run_prompts(tokens[:, known:], [counts[0] - known], known)
            features = kept.before(features, known)
        else:
            self.resize(len(tokens), slots)
            logits, features = self.run_prompts(tokens, counts)
        self.kept_tokens = known
        if self.keeps_prompts and alone and self.cache.recurrent is None:
            self._kept = KeptPrompt(tokens[0], features, self.cache)
        return logits, features

    def run_prompts(
        self, tokens: Tensor, counts: Sequence[int], first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The forward of `prefill`, over the cache as it is, from slot `first` on."""
        forward = partial(
            prefill_forward, self.runner, self.cache, tokens, counts, None, first=first
        )
        return self._run_tapped(tokens, forward)

    def prefill_apart(
        self, tokens: Tensor, counts: Sequence[int], kept: Sequence[int]
    ) -> tuple[SlabCache, Tensor]:
        """Run prompts as `prefill` does, into a cache of their own.

        Args:
            kept: so many tokens of each row come before its root.

        Returns:
            That cache, and features [B, T, F].
        """
        prior, self._kept_apart = self._kept_apart, None
        rows = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        known = 0 if prior is None else min(map(prior.begins, rows))
        apart = SlabCache(self.shapes, len(tokens), in_steps(tokens.shape[1]))
        if prior is not None and known:
            apart.take(prior.slab, 0, known)
        tokens = tokens[:, known:]
        counts, kept = ([each - known for each in every] for every in (counts, kept))
        forward = partial(prefill_forward, self.runner, apart, tokens, counts, kept, known)
        features = self._run_tapped(tokens, forward)[1]
        if prior is not None and known:
            features = prior.before(features, known)
        self.kept_tokens = known
        if self.keeps_prompts and apart.recurrent is None:
            one = apart
            if len(rows) > 1:
                one = SlabCache(self.shapes, 1, apart.capacity)
                one.take(apart, 0, len(rows[0]))
            self._kept_apart = KeptPrompt(rows[0], features[:1].clone(), one)
        return apart, features

    def verify(
        self, tree: TokenTree, lengths: Tensor, longest: int, even: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One forward over a tree: logits [B, N, V] and features [B, N, F].

        Args:
            lengths: [B] cached tokens of each row, the root's position.
            longest: the largest of `lengths`, on the host; even: whether all are that long.
        """
        live, shape = self.reserve(longest + tree.nodes), tree.topology
        if self.windows.tree:
            live = self.cache.capacity  # one launch for every length
        if shape.max_depth == 0:
            positions = lengths.unsqueeze(1)  # [B, 1]
        else:
            positions = shape.depth + (longest if even else lengths.unsqueeze(1))  # [B, N]
        if self.limit is not None and longest + shape.max_depth >= self.limit.positions:
            # Nodes past the limit are never accepted; they must only stay legal to run.
            positions = positions.clamp(max=self.limit.positions - 1)
        forward = partial(
            tree_forward,
            self.runner,
            self.cache,
            self.windows,
            tree.tokens,
            lengths,
            positions,
            shape.ancestors,
            live,
            longest if even else None,
            shape,
            self._run,
        )
        with self.fused or nullcontext():
            return self._run_tapped(tree.tokens, forward)

    def spare(self) -> "Target":
        """Another one like it, with a cache of its own."""
        found = copy.copy(self)
        found.cache = SlabCache(self.shapes, 0, 0)
        found._kept = found._kept_apart = None
        return found

    def keep(self, slots: int, capacity: int) -> None:
        """See `SlabCache.keep`."""
        self.cache.keep(slots, capacity)

    def resize(self, batch: int, capacity: int) -> None:
        """See `SlabCache.resize`."""
        self.cache.resize(batch, capacity)

    def adopt(self, other: SlabCache, rows: Tensor, slots: int) -> None:
        """Take rows of what `prefill_apart` returned, see `SlabCache.adopt`."""
        self.cache.adopt(other, rows, slots)

    def release(self) -> None:
        """See `SlabCache.release`."""
        self._kept = self._kept_apart = None
        self.cache.release()

    def reserve(self, slots: int) -> int:
        """Make room for so many slots a row; returns them rounded up to the step they grow in."""
        slots = in_steps(slots)
        self.cache.reserve(slots)
        return slots

    def commit(self, path: Tensor, in_place: bool = False) -> None:
        """Keep what layers cached of the last tree's `path` [B, A] (nodes from the root on).

        Args:
            in_place: whether its keys and values lie where they are to be.
        """
        # Entries past the accepted count land in slots that the next round overwrites.
        self.cache.commit(path, self.kernels, in_place)

    def _run_tapped(self, tokens: Tensor, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The logits of a forward over tokens [B, T], and its features [B, T, F]."""
        if self._streamed:
            forward = partial(run_streamed, self.runner, forward)
        if self.tap is not None:
            logits, features = self.tap.run(forward)
            return logits, features.to(logits.device)  # layers may lie on several GPUs
        return forward(), torch.empty(*tokens.shape, 0, device=tokens.device)
