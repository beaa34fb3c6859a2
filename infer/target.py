"""Drives a target model: prefill, verify a tree in one forward, commit the accepted path."""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
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

from .compiled import compiled
from .kept import KeptText, KeptTexts

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
        keeps_texts: whether prompts that begin as earlier texts are not run whole, see `prefill`;
            kept: those texts; kept_tokens: so many tokens of the last prompt were not run.

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
        self._run = compiled(model, inductor, attention) if inductor else None
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
        self.keeps_texts, self.kept_tokens, self.kept = False, 0, KeptTexts()

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

        Where it `keeps_texts`, a single one runs from the token on in which it differs from an
        earlier text.

        Args:
            tokens: [B, T] int64, padded on the right; counts: true ones of each row.

        Returns:
            Logits [B, V] after each row's last token, and features [B, T, F].
        """
        slots = in_steps(max(capacity, tokens.shape[1]))
        alone = self._keeps and len(tokens) == 1
        own = tokens[0].cpu().numpy() if alone else None
        while True:
            kept = bool(self.kept)
            try:
                known = 0 if own is None else self._begin_as(own, slots)
                if not known:
                    self.resize(len(tokens), slots)
                counts_left = [count - known for count in counts]
                logits, features = self.run_prompts(tokens[:, known:], counts_left, known)
                features = self._with_kept(self.cache, features, tokens.shape[1])
                break
            except torch.OutOfMemoryError:
                if not kept:
                    raise
            self.release()  # with all that is kept, for another try
        self.kept_tokens = known
        if own is not None:
            self.kept.last = KeptText(own, self.cache)
        return logits, features

    @property
    def _keeps(self) -> bool:
        """Whether texts are kept; recurrent layers have no state but after the last token."""
        return self.keeps_texts and self.cache.recurrent is None

    def _begin_as(self, tokens: np.ndarray, slots: int) -> int:
        """Have the first tokens of a prompt [T] in the cache, those of a kept text: how many."""
        self.kept.check(self.runner)
        text, known = self.kept.find(tokens)
        if text is None:
            return 0
        if text is self.kept.last:
            self.kept.leave(known)
            self.keep(known, slots)
        else:
            self.kept.use(text, known)
            self.resize(1, slots)
            self.cache.take(text.slab, 0, known)
        return known

    def _with_kept(self, cache: SlabCache, features: Tensor, length: int) -> Tensor:
        """The features of whole prompts [B, T, F], of whose last tokens a forward gave these."""
        if not self._keeps or self.tap is None:
            return features.new_empty(len(features), length, 0) if self._keeps else features
        cache.put_features(features)
        return cache.features(length)

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
        found = list[tuple[KeptText | None, int]]()
        rows = [row[:count].numpy() for row, count in zip(tokens.cpu(), counts, strict=True)]
        if self._keeps:
            self.kept.check(self.runner)
            found = [self.kept.find(row) for row in rows]
        known = min((count for _, count in found), default=0)
        apart = self.cache.like(len(tokens), in_steps(tokens.shape[1]))
        for row, (text, count) in enumerate(found):
            if text is not None and known:
                apart.take(text.slab, 0, known, row)
                self.kept.use(text, count)
        length = tokens.shape[1]
        tokens = tokens[:, known:]
        counts, kept = ([each - known for each in every] for every in (counts, kept))
        forward = partial(prefill_forward, self.runner, apart, tokens, counts, kept, known)
        features = self._run_tapped(tokens, forward)[1]
        features = self._with_kept(apart, features, length)
        self.kept_tokens = known
        if self._keeps:
            self.kept.copy(rows[0], apart, 0)
        return apart, features

    def keep_row(self, row: int, tokens: Sequence[int]) -> None:
        """Keep a row's text, all but its last token, where texts are kept."""
        if self._keeps:
            self.kept.copy(np.array(tokens[:-1]), self.cache, row)

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
            logits, features = self._run_tapped(tree.tokens, forward)
        if self._keeps and self.tap is not None:
            self.cache.put_features(features)
        return logits, features

    def spare(self) -> "Target":
        """Another one like it, with a cache of its own."""
        found = copy.copy(self)
        found.cache = SlabCache(self.shapes, 0, 0)
        found.kept = KeptTexts()
        return found

    def keep(self, slots: int, capacity: int) -> None:
        """See `SlabCache.keep`."""
        self.cache.keep(slots, capacity)

    def resize(self, batch: int, capacity: int) -> None:
        """See `SlabCache.resize`."""
        self.kept.leave()
        self.kept.make_room(self.cache, self.cache.bytes_of(batch, capacity))
        self.cache.resize(batch, capacity)

    def adopt(self, other: SlabCache, rows: Tensor, slots: int) -> None:
        """Take rows of what `prefill_apart` returned, see `SlabCache.adopt`."""
        self.cache.adopt(other, rows, slots)

    def release(self) -> None:
        """See `SlabCache.release`."""
        self.kept.clear()
        self.cache.release()

    def reserve(self, slots: int) -> int:
        """Make room for so many slots a row; returns them rounded up to the step they grow in."""
        slots = in_steps(slots)
        if slots > self.cache.capacity:
            self.kept.make_room(self.cache, self.cache.bytes_of(self.cache.batch, slots))
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
