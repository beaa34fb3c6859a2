"""The frozen target and the drafter that is trained on it, as one module.

Data-parallel wrappers then see one model; only the drafter's parameters are trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads import FINAL, OptionError, TrainableDrafter
from headstart.heads.artifacts.files import WEIGHTS
from headstart.heads.core import FeatureTap

from .data.training_rows import Rows
from .engine import weights_are_sharded
from .losses.draft_loss import DraftLoss, head_labels, label_counts


class TargetWithDrafter(nn.Module):
    """Computes the drafter's loss on texts, whose features the target computes or a cache holds.

    Args:
        head_decay, loss, feature_weight: see `DraftLoss`.

    Raises:
        OptionError: the drafter is not trainable, or see `DraftLoss`.
    """

    accepts_loss_kwargs = True  # the loss is scaled for gradient accumulation already
    needs_final: ClassVar[bool] = False  # even if neither drafter nor loss reads the final features
    preserve_rng_state: ClassVar[bool] = False  # see `DraftLoss`

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: TrainableDrafter,
        head_decay: float,
        loss: str = "cross_entropy",
        feature_weight: float = 0.0,
    ):
        super().__init__()
        if not drafter.trainable:
            raise OptionError(
                f"{type(drafter).__name__} has nothing to train; decode with it as it is."
            )
        self.target = target.requires_grad_(False).eval()
        self.drafter = drafter
        self.loss = DraftLoss(
            drafter, head_decay, loss, feature_weight, preserve_rng_state=self.preserve_rng_state
        )
        size, layers = drafter.config.hidden_size, list(drafter.config.feature_layers)  # D
        self.width = len(layers) * size  # F, what the drafter reads
        self.final: slice | None = None  # where the final feature is among the captured ones
        if self.loss.needs_final or self.needs_final:
            layers = layers if FINAL in layers else [*layers, FINAL]
            start = layers.index(FINAL) * size
            self.final = slice(start, start + size)
        self.captured = len(layers) * size  # C
        self.tap = FeatureTap(target, layers) if layers else None
        self.cache: Tensor | None = None  # [rows, T, C]

    def train(self, mode: bool = True) -> Self:
        """Switch the drafter alone; the target's own dropout stays off."""
        self.training = mode
        self.drafter.train(mode)
        return self

    def forward(
        self, rows: Tensor | None, tokens: Tensor, supervised: Tensor, counts: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The `loss` of a batch: tokens [B, T], supervised [B, T] bool.

        Args:
            rows: [B], their numbers among the cached rows; None for any other text.
            counts: see `counts`, of the whole optimizer step; of this batch when None.
        """
        captured = self.read(rows, tokens)
        return {"loss": self.draft_loss(captured, captured, tokens, supervised, counts)}

    def draft_loss(
        self, captured: Tensor, teaching: Tensor, tokens: Tensor, supervised: Tensor,
        counts: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The loss of a drafter that reads `captured`, with a teacher that reads `teaching`.

        Both are what `run_target` returns, [B, T, C].
        """
        labels = self.labels(tokens, supervised)
        counts = label_counts(labels) if counts is None else counts
        final = None if self.final is None else teaching[..., self.final]
        return self.loss(captured[..., : self.width], tokens, labels, counts, final)

    def labels(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """See `head_labels`.  # [K, B, T]"""
        drafter = self.drafter
        return head_labels(tokens, supervised, drafter.train_depths, drafter.draft_vocabulary)

    def counts(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """See `label_counts`.  # [K]"""
        return label_counts(self.labels(tokens, supervised))

    def read(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
        """The target's features at tokens [B, T], from the cache where it has them.  # [B, T, C]"""
        return self.features(tokens) if self.cache is None or rows is None else self.cache[rows]

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        return self.run_target(tokens)

    def run_target(self, tokens: Tensor) -> Tensor:
        """Run the target on tokens [B, T], without its output layer.  # [B, T, C]

        C holds the drafter's features, then the final one where only the loss needs it. Rows are
        padded on the right, so causal attention never reads the padding.
        """
        if self.tap is None:
            return torch.empty(*tokens.shape, 0, device=tokens.device)
        # While decoding, features have the target's own precision.
        with torch.autocast(tokens.device.type, enabled=False):
            self.target.get_decoder()(input_ids=tokens, use_cache=False)
        return self.tap.take()

    def fill_cache(self, rows: Rows, limit: float) -> bool:
        """Keep all rows' features if they take at most `limit` MB; returns whether they do."""
        if weights_are_sharded():
            return False  # the target runs only inside of the engine, which does not exist yet
        megabytes = rows.tokens.numel() * self.captured * self.target.dtype.itemsize / 1e6
        if megabytes > limit:
            return False
        # Always in the same batches of rows, so that a resumed run reads the very same numbers.
        parts = rows.tokens.to(self.target.device).long().split(16)
        self.cache = torch.cat([self.features(part) for part in parts])
        return True

    def trained(self) -> list[nn.Module]:
        """What learns, as modules."""
        return [self.drafter]

    def load(self, folder: Path) -> None:
        """Read what learns from a checkpoint."""
        self.drafter.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))

    def release(self) -> None:
        """Drop the cache and remove the hooks from the target."""
        self.cache = None
        if self.tap is not None:
            self.tap.close()
