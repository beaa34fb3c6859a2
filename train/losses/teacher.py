"""The target's distribution, computed from its final features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads import FINAL, OptionError
from headstart.heads.core import FeatureTap, output_layer


class Teacher:
    """Gives the target's log-probabilities at chosen positions, from its final features there.

    Args:
        vocabulary: [Vd] the draft vocabulary, to which the distribution is renormalised; None for
            the target's.

    Raises:
        OptionError: the target changes its output layer's logits in an unknown way.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None = None):
        self.layer, self.vocabulary = output_layer(target), vocabulary
        self.finish = _finish(target)

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        """Final features [M, D] -> log-probabilities [M, Vd], float32."""
        logits = self.logits(self.layer, features)
        if self.vocabulary is not None:
            logits = logits.index_select(1, self.vocabulary)
        return logits.float().log_softmax(-1)

    def logits(self, layer: nn.Module, features: Tensor) -> Tensor:
        """Final features [M, D] -> logits [M, V] of the target with any output layer."""
        with torch.autocast(features.device.type, enabled=False):
            return self.finish(layer(features))


@torch.no_grad()
def _finish(target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What a target does to its output layer's logits: nothing, a factor, or a soft cap.

    Found by trying, since the names in configs do not mean the same in every model.
    """
    config = target.config.get_text_config(decoder=True)
    tap = FeatureTap(target, [FINAL])
    ids = torch.arange(8, device=target.device).unsqueeze(0) % config.vocab_size
    expected = target(input_ids=ids, use_cache=False).logits.float()
    raw = output_layer(target)(tap.take())
    tap.close()
    tries: list[Callable[[Tensor], Tensor]] = [lambda logits: logits]
    for name in ("logit_scale", "logits_scaling"):
        if factor := getattr(config, name, None):
            tries += [lambda logits, f=factor: logits * f, lambda logits, f=factor: logits / f]
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        if cap := getattr(config, name, None):
            tries.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)
    close = 1e-4 if raw.dtype in (torch.float32, torch.float64) else 3e-2
    for finish in tries:
        if (finish(raw).float() - expected).abs().amax() <= close * expected.abs().amax():
            return finish
    raise OptionError(
        f"{config.model_type} changes its output layer's logits in a way that train.loss does not "
        "know; expected none, a factor or a soft cap: use train.loss=cross_entropy."
    )
