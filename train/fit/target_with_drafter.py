"""The frozen target and the drafter that is trained on it, as one module.

Data-parallel wrappers then see one model; only the drafter's parameters are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads import FINAL, OptionError, TrainableDrafter
from headstart.heads.core import FeatureTap, decoder_of, in_parts
from headstart.heads.families import with_article
from headstart.infer.measure.progress import progress_bar

from ..data.batches import collate
from ..data.training_rows import Rows
from ..losses.draft_loss import (
    DraftLoss,
    head_labels,
    label_counts,
    some_starts,
    thinned_depths,
    unbroken,
)
from ..processes.agreement import in_parallel, own_share, wait_for_all, world_size
from ..processes.engine import weights_are_sharded
from .feature_files import FeatureFiles, FeatureFolder

logger = logging.getLogger(__name__)


class TargetWithDrafter(nn.Module):
    """Computes the drafter's loss on texts, whose features the target computes or a cache holds.

    Args:
        head_decay, loss, feature_weight, weights: see `DraftLoss`.

    Raises:
        OptionError: the drafter is not trainable, or see `DraftLoss`.
    """

    accepts_loss_kwargs = True  # the loss is scaled for gradient accumulation already
    needs_final: ClassVar[bool] = False  # even if neither drafter nor loss reads the final features

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: TrainableDrafter,
        head_decay: float,
        loss: str | Mapping[str, float] = "cross_entropy",
        feature_weight: float = 0.0,
        weights: str = "none",
    ):
        super().__init__()
        if not drafter.trainable:
            raise OptionError(
                f"{type(drafter).__name__} has nothing to train; decode with it as it is."
            )
        target.requires_grad_(False).eval()
        if in_parts(target):  # wrappers of the module must not take the parts for whole weights
            object.__setattr__(self, "target", target)
        else:
            self.target = target
        self.drafter = drafter
        self.loss = DraftLoss(drafter, head_decay, loss, feature_weight, weights=weights)
        size, layers = drafter.config.hidden_size, list(drafter.config.feature_layers)  # D
        self.width = len(layers) * size  # F, what the drafter reads
        self.final: slice | None = None  # where the final feature is among the captured ones
        if self.loss.needs_final or self.needs_final:
            layers = layers if FINAL in layers else [*layers, FINAL]
            start = layers.index(FINAL) * size
            self.final = slice(start, start + size)
        self.captured = len(layers) * size  # C
        self.layers = layers  # where they are captured
        self.tap = FeatureTap(target, layers) if layers else None
        self.step = 0  # the number of the optimizer's step, which chooses where drafts start
        self.cache: Tensor | None = None  # [tokens of all rows, C]
        self.files: FeatureFiles | None = None

    def train(self, mode: bool = True) -> Self:
        """Switch the drafter alone; the target's own dropout stays off."""
        self.training = mode
        self.drafter.train(mode)
        return self

    @property
    def hf_device_map(self) -> dict[str, Any]:
        """Which layers of the target are on which device, where it is spread over several."""
        return self.target.hf_device_map  # type: ignore[return-value]

    def set_up(self, activation_checkpointing: bool, compile: bool) -> None:
        """See the keys of this name in a recipe's `train`.

        Raises:
            OptionError: there are no layers whose activations could be computed again.
        """
        if activation_checkpointing:
            self.checkpoint_activations()
        if compile:
            states = torch.compile(self.drafter.draft_hidden_states, dynamic=True)
            self.drafter.draft_hidden_states = states  # type: ignore[method-assign]

    def checkpoint_activations(self) -> None:
        """Compute activations again in the backward pass; see `checkpoint_activations` below."""
        checkpoint_activations(self.drafter)

    def forward(
        self,
        rows: Tensor | None,
        tokens: Tensor,
        supervised: Tensor,
        counts: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """`loss`, `by_depth` and `hits` of a batch, see `DraftLoss`.

        Args:
            tokens: [B, T]; supervised: [B, T] bool.
            rows: [B], their numbers among the cached rows, or [B, S] where each holds up to S of
                them; None for any other text.
            counts: see `counts`, of the whole optimizer step; of this batch when None.
            segments, positions: [B, T] where rows hold several documents: the number of each
                token's document, -1 for padding, and its place in that document, from 0.
            options: of the stage of the training, see `stages`.
        """
        captured = self.read(rows, tokens, segments, positions)
        counts = self.counts(tokens, supervised, segments) if counts is None else counts
        batch = tokens, supervised, counts, segments, positions
        loss = self.whole_loss(captured, *batch, **options)
        return {"loss": loss, "by_depth": self.loss.by_depth, "hits": self.loss.hits}

    def whole_loss(self, captured: Tensor, *batch: Any) -> Tensor:
        """What `forward` minimises, of the target's features [B, T, C] and the rest of a batch."""
        return self.draft_loss(captured, captured, *batch)

    def draft_loss(
        self, captured: Tensor, teaching: Tensor, tokens: Tensor, supervised: Tensor,
        counts: Tensor, segments: Tensor | None, positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The loss of a drafter that reads `captured`, with a teacher that reads `teaching`.

        Both are what `run_target` returns, [B, T, C].
        """
        labels = self.labels(tokens, supervised, segments)
        final = None if self.final is None else teaching[..., self.final]
        read = captured[..., : self.width]
        return self.loss(read, tokens, labels, counts, final, positions)

    def labels(self, tokens: Tensor, supervised: Tensor, segments: Tensor | None = None) -> Tensor:
        """See `head_labels`; of the positions and depths that this step drafts.  # [K, B, T]"""
        depths, known = self.drafter.train_depths, self.drafter.draft_vocabulary
        labels = head_labels(tokens, supervised, depths, known, segments)
        if self.drafter.drafts_blocks:
            labels = unbroken(labels, supervised)
        if (most := self.drafter.starts_a_row) is not None:
            labels = some_starts(labels, tokens, supervised, most, self.step)
        if (shares := self.drafter.depth_shares) is not None:
            labels = thinned_depths(labels, tokens, supervised, shares, self.step, segments)
        return labels

    def counts(self, tokens: Tensor, supervised: Tensor, segments: Tensor | None = None) -> Tensor:
        """See `label_counts`.  # [K]"""
        return label_counts(self.labels(tokens, supervised, segments))

    def read(
        self,
        rows: Tensor | None,
        tokens: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The target's features at tokens [B, T], as they are kept if they are.  # [B, T, C]

        In the padding stand other features then: the cache's of other tokens, or zeros.
        """
        if self.files is not None and rows is not None:
            return self.files.features(rows, tokens, positions, self.features)
        if self.cache is None or rows is None:
            return self.features(tokens, positions)
        rows, device = rows.to(self.cache.device), self.cache.device
        if segments is None or positions is None:
            steps = torch.arange(tokens.shape[1], device=device)
            places = self.starts[rows].unsqueeze(1) + steps  # [B, T]
        else:
            rows = rows.gather(1, segments.clamp(min=0).long())  # [B, T]
            places = self.starts[rows] + positions
        return self.cache[places.clamp(max=len(self.cache) - 1)]

    @torch.no_grad()
    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.run_target(tokens, positions)

    def run_target(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the target on tokens [B, T], without its output layer.  # [B, T, C]

        C holds the drafter's features, then the final one where only the loss needs it. Rows are
        padded on the right, so causal attention never reads the padding. Where rows hold several
        documents, transformers finds them by the positions; FlashAttention only in a single row.
        """
        device, shape, packed = tokens.device, tokens.shape, {}
        if self.tap is None:
            return torch.empty(*shape, 0, device=device)
        decoder = decoder_of(self.target)
        if positions is not None:
            one = "flash" in str(decoder.config._attn_implementation)
            tokens, positions = (x.view(1, -1) if one else x for x in (tokens, positions))
            packed = {"position_ids": positions}
        # While decoding, features have the target's own precision.
        with torch.autocast(device.type, enabled=False):
            decoder(input_ids=tokens, use_cache=False, **packed)
        # A target over several devices leaves its features where their layers are.
        return self.tap.take().to(device).view(*shape, -1)

    def megabytes(self, tokens: float) -> float:
        """What the features of so many tokens take, kept in memory."""
        return tokens * self.captured * self.target.dtype.itemsize / 1e6

    def fill_cache(self, rows: Rows, limit: float, progress: bool = False) -> bool:
        """Keep all rows' features if they take at most `limit` MB; returns whether they do.

        Every process keeps all of them, and computes a share, where it can without the others.
        """
        if weights_are_sharded():
            return False  # the target runs only inside of the engine, which does not exist yet
        total, device = int(rows.offsets[-1]), self.target.device
        megabytes = self.megabytes(total)
        where = "online" if megabytes > limit else f"kept on {device}"
        logger.info("features: %.0f MB, train.feature_cache_mb %.0f: %s", megabytes, limit, where)
        if megabytes > limit:
            return False
        self.starts = torch.from_numpy(rows.offsets[:-1]).to(device)  # [rows]
        cache = torch.empty(total, self.captured, dtype=self.target.dtype, device=device)
        # Always in the same batches of rows, so that a resumed run reads the very same numbers.
        batches = [(first, min(first + 16, len(rows))) for first in range(0, len(rows), 16)]
        divided = in_parallel() and not in_parts(self.target)
        own, processes = (own_share(batches), world_size()) if divided else (batches, 1)
        bar = progress_bar(len(rows), "features", "text", disable=not (progress and self.captured))
        for number, (first, last) in enumerate(own, start=1):
            tokens = collate([rows[number] for number in range(first, last)])["tokens"].to(device)
            lengths = torch.from_numpy(rows.lengths[first:last]).to(device)
            real = torch.arange(tokens.shape[1], device=device) < lengths.unsqueeze(1)  # [B, T]
            cache[rows.offsets[first] : rows.offsets[last]] = self.features(tokens)[real]
            done = batches[min(number * processes, len(batches)) - 1][1]  # by all of them, about
            bar.update(done - bar.n)
        bar.close()
        if divided and self.captured:
            wait_for_all()  # as long as it takes, which a collective would not
            for number, (first, last) in enumerate(batches):
                part = cache[rows.offsets[first] : rows.offsets[last]]
                # As bytes, which every backend sends.
                torch.distributed.broadcast(part.view(torch.uint8), number % processes)
        self.cache = cache
        return True

    def open_files(self, folder: FeatureFolder, rows: Rows, together: bool) -> None:
        """Keep rows' features in files from now on; see `FeatureFolder.open`."""
        if self.captured:
            what = self.layers, self.captured, self.target.dtype
            self.files = folder.open(rows, *what, together)

    def trained(self) -> list[nn.Module]:
        """What learns, as modules."""
        return [self.drafter]

    def stages(self) -> list[tuple[float, dict[str, Any]]]:
        """The stages of a training: each one's share, and its further arguments of `forward`."""
        return [(1.0, {})]

    def load(self, folder: Path) -> None:
        """Read what learns from a checkpoint."""
        self.drafter.load_checkpoint(folder)

    def release(self) -> None:
        """Drop the cache and remove the hooks from the target."""
        self.cache = self.files = None
        if self.tap is not None:
            self.tap.close()


def checkpoint_activations(drafter: TrainableDrafter) -> None:
    """See `TrainableDrafter.checkpoint_activations`; an OptionError where it does nothing."""
    if not drafter.checkpoint_activations():
        raise OptionError(
            "train.activation_checkpointing is true, but "
            f"{with_article(drafter.config.family_name())} drafter "
            "has no layers whose activations take much memory; set it to false."
        )
