"""Continues prefixes of different lengths with a language model, as rows to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from headstart.infer import Speculator

from ..recipe import Distill
from .prefixes import DistillError


def check_context(spec: Distill, writer: PreTrainedModel, name: str = "target") -> None:
    """Raise DistillError where rows are longer than the context of the model that writes them."""
    wanted = spec.prefix_tokens + spec.new_tokens
    context = getattr(writer.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and wanted > context:
        raise DistillError(
            f"distill.prefix_tokens {spec.prefix_tokens} and new_tokens {spec.new_tokens} make "
            f"{wanted} tokens, but the {name}'s context is {context}; lower one of them."
        )


def write_rows(
    speculator: Speculator,
    prefixes: Sequence[Tensor],
    seeds: list[int],
    spec: Distill,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue prefixes [P] of any length.

    Args:
        seeds: one a row, of its sampling noise.
        options: further ones of `generate`, such as another `eos_token_id` than the model's.

    Returns:
        On the CPU: the text [B, prefix_tokens + new_tokens], each row from column 0 on, its
        length [B], and its prefix's length [B].
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if spec.temperature > 0:
        # generate's defaults, or the model's own config, would restrict the sampling.
        whole = {"top_k": 0, "top_p": 1.0}
        sampling = {"do_sample": True, "temperature": spec.temperature, "seed": seeds, **whole}
    config: Any = speculator.model.generation_config
    end = options.get("eos_token_id", config.eos_token_id)
    counts = torch.tensor([len(prefix) for prefix in prefixes])
    width = int(counts.max())
    pads = width - counts  # [B], on the left
    padded = [functional.pad(p, (width - len(p), 0)) for p in prefixes]
    device = speculator.model.device
    text = speculator.generate(
        torch.stack(padded).to(device),
        attention_mask=(torch.arange(width) >= pads.unsqueeze(1)).long().to(device),
        max_new_tokens=spec.new_tokens,
        **sampling,
        **options,
    ).cpu()
    lengths = true_lengths(text, end, width) - pads
    # Training rows are padded on the right; the batch may also have ended early.
    columns = torch.arange(spec.prefix_tokens + spec.new_tokens)
    source = (columns + pads.unsqueeze(1)).clamp(max=text.shape[1] - 1)
    tokens = text.gather(1, source).masked_fill(columns >= lengths.unsqueeze(1), 0)
    return tokens, lengths, counts


def true_lengths(text: Tensor, end: int | list[int] | None, prefix: int) -> Tensor:
    """Tokens of each row up to its first end-of-text after the prefix, that one included.  # [B]"""
    if end is None:
        return torch.full((len(text),), text.shape[1])
    ends = torch.isin(text[:, prefix:], torch.tensor(end, device=text.device))  # [B, new]
    cut = torch.where(ends.any(1), ends.byte().argmax(1) + 1, ends.shape[1])
    return prefix + cut
