"""The frozen target and the drafter that is trained on it, as one module.

Data-parallel wrappers then see one model; only the drafter's parameters are trained.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads import FINAL, Drafter, OptionError
from headstart.heads.core import FeatureTap

from .data.distill import Rows
from .losses import LOSSES
from .losses.draft_loss import draft_loss
from .losses.labels import head_labels, label_counts
from .losses.teacher import Teacher

_CACHE_ROWS = 16  # rows a forward while filling the feature cache


class TargetWithDrafter(nn.Module):
    """Computes the drafter's loss on texts, from features that the target computes or cached ones.

    Args:
        head_decay: the weight of depth k in the loss is head_decay**k.
        loss: a name in `LOSSES`.
        feature_weight: see `draft_loss`.

    Raises:
        OptionError: the drafter is not trainable, the loss needs a distribution that cannot be
            derived from the target's features, or `feature_weight` is set for a drafter that
            predicts no features.
    """

    accepts_loss_kwargs = True  # the loss is scaled for gradient accumulation already
    needs_final_features: ClassVar[bool] = False  # even where neither drafter nor loss does
    dropout_in_output_layer: ClassVar[bool] = False

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        head_decay: float,
        loss: str = "cross_entropy",
        feature_weight: float = 0.0,
    ):
        super().__init__()
        if not drafter.train_depths:
            raise OptionError(
                f"{type(drafter).__name__} has nothing to train; decode with it as it is."
            )
        self.target = target.requires_grad_(False).eval()
        self.drafter = drafter
        self.head_decay, self.loss, self.feature_weight = head_decay, LOSSES[loss], feature_weight
        self.teacher: Teacher | None = None
        if self.loss.divergence is not None:
            self.teacher = Teacher(target, drafter.draft_vocabulary)
        size = target.config.get_text_config(decoder=True).hidden_size  # D
        if feature_weight and drafter.predicted_features(torch.empty(0, 0, size)) is None:
            raise OptionError(
                f"train.feature_weight is {feature_weight}, but {type(drafter).__name__} predicts "
                "no features that could be compared with the target's; set it to 0."
            )
        layers = list(drafter.config.feature_layers)
        self.width = len(layers) * size  # F, what the drafter reads
        self.final: slice | None = None  # where the final features are among the captured ones
        if self.teacher or feature_weight or self.needs_final_features:
            layers = layers if FINAL in layers else [*layers, FINAL]
            start = layers.index(FINAL) * size
            self.final = slice(start, start + size)
        self.captured_width = len(layers) * size  # C
        self.tap = FeatureTap(target, layers) if layers else None
        self.cache: Tensor | None = None  # [rows, T, C]

    def train(self, mode: bool = True) -> Self:
        """Switch the drafter alone; the target's own dropout stays off."""
        self.training = mode
        self.drafter.train(mode)
        return self

    def forward(
        self,
        rows: Tensor | None,
        tokens: Tensor,
        supervised: Tensor,
        counts: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The `loss` of a batch: tokens [B, T], supervised [B, T] bool.

        Args:
            rows: [B], their numbers among the cached rows; None for any other text.
            counts: see `counts`, of the whole optimizer step; of this batch when None.
        """
        captured = self.read(rows, tokens)
        return {"loss": self.draft_loss(captured, captured, tokens, supervised, counts)}

    def draft_loss(
        self,
        captured: Tensor,
        teaching: Tensor,
        tokens: Tensor,
        supervised: Tensor,
        counts: Tensor | None,
    ) -> Tensor:
        """See `losses.draft_loss`: the drafter reads `captured`, the teacher `teaching`.

        Both are what `read` or `run_target` returns, [B, T, C].
        """
        labels = self.labels(tokens, supervised)  # [K, B, T]
        return draft_loss(
            self.drafter,
            captured[..., : self.width],
            tokens,
            labels,
            label_counts(labels) if counts is None else counts,
            self.head_decay,
            self.loss,
            self.teacher,
            None if self.final is None else teaching[..., self.final],
            feature_weight=self.feature_weight,
            preserve_rng_state=self.dropout_in_output_layer,
        )

    def labels(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """See `head_labels`.  # [K, B, T]"""
        drafter = self.drafter
        return head_labels(tokens, supervised, drafter.train_depths, drafter.draft_vocabulary)

    def counts(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """How many labels of each depth a batch has.  # [K]"""
        return label_counts(self.labels(tokens, supervised))

    def read(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
        """The target's features at tokens [B, T], from the cache where it has them.  # [B, T, C]"""
        if self.cache is None or rows is None:
            return self.features(tokens)
        return self.cache[rows]

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """See `run_target`; without a gradient."""
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
        """Keep the features of all rows if they take at most `limit` MB; returns whether they do."""
        megabytes = rows.tokens.numel() * self.captured_width * self.target.dtype.itemsize / 1e6
        if megabytes > limit:
            return False
        # Always in the same batches, so that a resumed run reads the very same numbers.
        parts = rows.tokens.to(self.target.device).long().split(_CACHE_ROWS)
        self.cache = torch.cat([self.features(part) for part in parts])
        return True

    def release(self) -> None:
        """Drop the cache and remove the hooks from the target."""
        self.cache = None
        if self.tap is not None:
            self.tap.close()
