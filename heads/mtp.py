"""MTP: the target's own module for multi-token prediction, or a new one, used again and again.

It is EAGLE with two norms and a decoder layer of the target's own kind: a norm reads the embedding
of a token, another one the hidden state before it, a linear layer mixes the two, and the norm after
the layer leaves what the target's output layer and the next pair read:

    x_t+1 -> enorm ┐
                   ├-> eh_proj -> decoder layer -> norm -> h_t+1 -> output layer: x_t+2
    f_t   -> hnorm ┘

Models ship such a module beside their layers (DeepSeek-V3, arXiv 2412.19437; GLM-4.5, Qwen3.5 and
others), taught to predict one token ahead of the next. Trained to continue its own states (FastMTP,
arXiv 2509.18362), one layer serves every depth. Where some of the target's layers are recurrent,
the module's is one of those that attend.
"""

import logging
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .core import decoder_of, device_of, output_layer
from .declared.fields import VocabularyFields
from .drafter import DrafterConfig
from .eagle import Eagle
from .parts.cached_layers import CachedLayers
from .parts.draft_attention import knows_flex
from .parts.own_layers import (
    compute_experts_alike,
    last_norm,
    norm_eps,
    norm_scale,
    silence,
    unit_scale_init,
)
from .parts.published.mtp import MTP, mtp
from .parts.shipped_module import NoModule, shipped_module
from .parts.target_layer import Readable, own_target_layer, target_layer

logger = logging.getLogger(__name__)

_OF_TOKEN = 0.5
"""The size of what a new module adds of the token to a feature of size 1."""


@strict
class MtpConfig(VocabularyFields, DrafterConfig):
    """MTP's shape.

    Attributes:
        layer: the config of a model of one of the target's layers, see `target_layer`.
        depths: K, how many tokens in a row a training loss covers.
    """

    model_type = "headstart_mtp"
    layer: dict[str, Any] | None = None
    depths: int = 4
    output: Literal["shared", "trimmed"] = "shared"

    OPTIONS: ClassVar[tuple[str, ...]] = ("depths", "output", "draft_vocab_size")
    RANGES: ClassVar = {"at least 1": ("depths",)}

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        config.layer = target_layer(target)
        return config


class Mtp(Eagle):
    """A layer of the target's own kind between norms; drafts one token after another."""

    config_class = MtpConfig
    config: MtpConfig
    from_checkpoint = staticmethod(mtp)
    exports = MTP
    in_target = True

    @classmethod
    def of_target(cls, target: PreTrainedModel) -> Self:
        """The module that the target's own files hold, on its output layer's device; not bound yet.

        Raises:
            OptionError: they hold none that can be read, with the reason.
        """
        shipped = shipped_module(target)
        drafter: Any = super().of_target(target)
        for weight in drafter.parameters():  # `to` would round the rotary frequencies, too
            weight.data = weight.data.to(target.dtype)
        drafter._take(shipped)
        return drafter.to(device_of(output_layer(target))).eval()

    def _own_layers(self, layer: dict[str, Any]) -> tuple[Any, CachedLayers]:
        model = own_target_layer(layer)
        return model, CachedLayers(model, tried=Readable(model))

    def _make(self, config: MtpConfig) -> None:
        size, eps = config.hidden_size, norm_eps(self.model.config)
        self.enorm, self.hnorm = (Qwen3RMSNorm(size, eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        if config.output == "trimmed":
            self.lm_head = nn.Linear(size, config.output_size, bias=False)
        inner: Any = self.model.config
        if not knows_flex(self.model):
            self._mask_options = {"flex": False}
        self._hidden_first = bool(getattr(inner, "mtp_hidden_states_first", False))

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # type: ignore[override]
        """Save it by its own names, also where the target's files have others, as experts do."""
        super().save_pretrained(folder, **{"save_original_format": False, **options})

    def bind(self, target: PreTrainedModel) -> Self:
        compute_experts_alike(self.model, target)
        return super().bind(target)

    def _pairs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        pairs = [self.enorm(self.embed(tokens)), self.hnorm(hidden.to(self.dtype))]
        pairs = torch.cat(pairs[::-1] if self._hidden_first else pairs, -1)
        return self.eh_proj(pairs).to(self.dtype)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start with the module in the target's files or, where there is none, by predicting what
        the target's output layer does: the layer adds nothing yet to the feature and a little of
        the token, and the norms before and after it undo each other."""
        if self.config.output == "trimmed":
            self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))
        try:
            self._take(shipped_module(self.target))
            return
        except NoModule as error:
            if error.reason:
                logger.warning("%s Training starts with a new one.", error)
        unit_scale_init(self.model)
        silence(self.model)
        size = self.config.hidden_size
        parts = self.eh_proj.weight.chunk(2, 1)
        token, feature = parts[::-1] if self._hidden_first else parts
        token.normal_(std=_OF_TOKEN * size**-0.5)
        feature.copy_(torch.eye(size))
        if (scale := norm_scale(self.target)) is not None:
            divisor = scale.abs().clamp(min=1e-3 * scale.abs().max()).copysign(scale)
            self.hnorm.weight.copy_(scale.square().mean().sqrt() / divisor)
            norm = last_norm(decoder_of(self.target))
            last_norm(self.model).load_state_dict(norm.state_dict())

    def _take(self, shipped: dict[str, Tensor]) -> None:
        """Copy the weights of the target's own module, see `shipped_module`."""
        missing, unexpected = self.load_state_dict(shipped, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight", "vocabulary"}, missing
