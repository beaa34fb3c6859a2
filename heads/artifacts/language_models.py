"""Loading of ordinary language models as draft models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from ..draft_model import DraftModel
from .manifest import tokenizer_hash
from .source import DrafterSource


def load_language_model(
    source: DrafterSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> DraftModel:
    """Load a causal language model, any but headstart's own, as the draft model of a target.

    Args:
        tokenizer: the target's; loaded where it is not given.
        options: passed to `from_pretrained`.

    Raises:
        ArtifactError: it cannot be loaded, or its tokenizer is not the target's.
    """
    try:
        own: Any = AutoTokenizer.from_pretrained(source.folder)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{source} holds no tokenizer that can be loaded, so nobody knows whether its ids are "
            "the target's; save the tokenizer beside the model."
        ) from error
    try:
        expected: Any = tokenizer
        if expected is None:
            expected = AutoTokenizer.from_pretrained(target.name_or_path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{source} is compared with the target by their tokenizers, and the target's was "
            "not found; pass tokenizer=…."
        ) from error
    if tokenizer_hash(own) != tokenizer_hash(expected):
        raise ArtifactError(
            f"{source} has another tokenizer than the target ({len(own)} tokens, expected those of "
            f"the target's {len(expected)}); use a smaller model of the target's own family."
        )
    try:
        return DraftModel.from_pretrained(source.folder, use_safetensors=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(
            f"{source} cannot be loaded as a causal language model ({reason}); expected one with "
            "weights in safetensors."
        ) from error
