"""What `Speculator.generate` takes beyond what `model.generate` hands to a callable."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from headstart.heads import OptionError


class GenerateOptions:
    """The keyword arguments of one call of `generate`, resolved as transformers resolves them.

    Args:
        options: as they were given; taken over.
        defaults: the model's own generation config.
    """

    def __init__(self, options: dict[str, Any], defaults: GenerationConfig):
        self.options, self._defaults = options, defaults

    def get(self, name: str) -> Any:
        """An option as `generate` resolves it: the call's, its config's, the model's."""
        if name in self.options:
            return self.options[name]
        given = getattr(self.options.get("generation_config"), name, None)
        return getattr(self._defaults, name, None) if given is None else given

    def set(self, **values: Any) -> None:
        """Set options of the call, in its generation config where it has one, in a copy."""
        options = self.options
        if options.get("generation_config") is None:
            options.update(values)
            return
        config = options["generation_config"] = copy.deepcopy(options["generation_config"])
        for name, value in values.items():
            options.pop(name, None)
            setattr(config, name, value)

    def take_stop_strings(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Turn `stop_strings` into a criterion; `generate` hands no tokenizer to a callable.

        Raises:
            OptionError: there is no tokenizer.
        """
        if not (strings := self.get("stop_strings")):
            return
        criteria = StoppingCriteriaList(self.options.pop("stopping_criteria", None) or [])
        if not any(type(criterion) is StopStringCriteria for criterion in criteria):
            if tokenizer is None:
                raise OptionError(
                    "stop_strings need the target's tokenizer, found none; pass tokenizer=…."
                )
            criteria.append(StopStringCriteria(tokenizer, strings))
        self.options["stopping_criteria"] = criteria
        self.set(stop_strings=None)
        self.options.pop("stop_strings", None)

    def check_padding(self, input_ids: Tensor | None) -> None:
        """Refuse what looks padded on the right where `generate` would take padding for text.

        It infers no mask when the padding token is an end token too.

        Raises:
            OptionError: a prompt of [B, P] ends with that token.
        """
        if (
            input_ids is None
            or len(input_ids) < 2
            or self.options.get("attention_mask") is not None
        ):
            return
        eos, pad = self.get("eos_token_id"), self.get("pad_token_id")
        eos = torch.as_tensor([] if eos is None else eos).flatten().tolist()
        pad = eos[0] if pad is None and eos else pad
        if pad in eos and input_ids.shape[1] and bool((input_ids[:, -1] == pad).any()):
            raise OptionError(
                f"a prompt ends with token {pad}, which is padding and end token, and there is no "
                "attention_mask; pass it, and pad on the left: tokenizer.padding_side = 'left'."
            )


@contextmanager
def without_stop_strings(config: GenerationConfig) -> Iterator[None]:
    """Keep the model's own stop strings from `generate`, which has no tokenizer for a callable."""
    strings, config.stop_strings = config.stop_strings, None
    try:
        yield
    finally:
        config.stop_strings = strings
