"""From a model's final hidden state to its logits: output layer, scale or soft cap, vocabulary."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import OptionError, UnsupportedTarget
from .eval_mode import eval_mode
from .features import FINAL, FeatureTap


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that reads the final hidden state.

    Raises:
        UnsupportedTarget: the model has none.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise UnsupportedTarget(
            f"{model.config.model_type} has no output layer that a drafter could read; a target "
            "needs get_output_embeddings()."
        )
    return cast(nn.Linear, layer)


class OutputLayer:
    """A model's logits from its final hidden states, without a forward of the model.

    Args:
        model: its output layer is taken as it is now, also if it is wrapped by an adapter later.
        vocabulary: [Vd] the columns to return; all of them when None.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: Tensor | None = None):
        self.model, self.vocabulary = model, vocabulary
        self.layer = output_layer(model)

    def __call__(self, hidden: Tensor, layer: nn.Module | None = None) -> Tensor:
        """Final hidden states [..., D] -> logits [..., Vd], in the layer's dtype.

        Args:
            layer: used in place of the model's own, which it was made from.

        Raises:
            OptionError: see `finish`.
        """
        logits = self.finish((layer or self.layer)(hidden))  # [..., V]
        return logits if self.vocabulary is None else logits.index_select(-1, self.vocabulary)

    def raw(self, hidden: Tensor) -> Tensor:
        """What the layer alone makes of states [..., D] of any dtype: [..., V].

        Drafters whose own states stand in for final hidden states are trained with these.
        """
        return self.layer(hidden.to(self.layer.weight.dtype))

    @cached_property
    def finish(self) -> Callable[[Tensor], Tensor]:
        """What the model does to its output layer's logits: nothing, a factor, or a soft cap.

        Found when first used, by one forward over 8 tokens, since names in configs do not mean the
        same in every model.

        Raises:
            OptionError: the model does something else.
        """
        config: Any = self.model.config.get_text_config(decoder=True)
        ids = torch.arange(8, device=self.model.device).unsqueeze(0) % config.vocab_size
        with eval_mode(self.model), FeatureTap(self.model, [FINAL]) as tap:
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
            raw = self.layer(tap.take())
        tries: list[Callable[[Tensor], Tensor]] = [lambda logits: logits]
        for name in ("logit_scale", "logits_scaling"):
            if factor := getattr(config, name, None):
                tries += [lambda logits, f=factor: logits * f, lambda logits, f=factor: logits / f]
        for name in ("final_logit_softcapping", "logits_soft_cap"):
            if cap := getattr(config, name, None):
                tries.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)
        close = 1e-4 if raw.dtype in (torch.float32, torch.float64) else 3e-2
        # The best of them, since a cap hardly changes small logits.
        errors = [(finish(raw).float() - expected).abs().amax().item() for finish in tries]
        least = min(errors)
        if least <= close * expected.abs().amax():
            return tries[errors.index(least)]
        raise OptionError(
            f"{config.model_type} changes its output layer's logits in a way that train.loss does "
            "not know; expected none, a factor or a soft cap: use train.loss=cross_entropy, or "
            "another drafter if this is the draft model."
        )
