"""The rows that a drafter is trained on: prefixes, and what a language model writes after them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from headstart.infer import Speculator

from ..recipe import Distill
from .prefixes import DistillError

logger = logging.getLogger(__name__)

COLUMNS = ("tokens", "length", "prompt_length")  # of a shard: [n, T], [n] and [n], int32


@dataclass
class Rows(Dataset):
    """Training rows: tokens [n, T] int32, lengths [n] and prompt_lengths [n].

    An item is a dict: `rows` its number, `tokens` [T] int64, and `supervised` [T] bool, which is
    true where the target wrote the token.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """All shards of a folder, in order, without rows in which the target wrote nothing."""
        shards = [safetensors.torch.load_file(f) for f in sorted(folder.glob("*.safetensors"))]
        if not shards:
            raise DistillError(f"{folder} holds no shard; run again with --fresh.")
        columns = [torch.cat([shard[name] for shard in shards]) for name in COLUMNS]
        written = columns[1] > columns[2]
        if not written.all():
            logger.warning("%d rows without a written token skipped", int((~written).sum()))
        if not written.any():
            raise DistillError(f"{folder}: the target wrote no token in any row; run with --fresh.")
        return cls(*(column[written] for column in columns))

    def __post_init__(self) -> None:
        steps = torch.arange(self.tokens.shape[1])
        after_prompt = steps >= self.prompt_lengths.unsqueeze(1)
        self.written = after_prompt & (steps < self.lengths.unsqueeze(1))  # [n, T]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens, supervised = self.tokens[number].long(), self.written[number]
        return {"rows": torch.tensor(number), "tokens": tokens, "supervised": supervised}

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token.  # [V]"""
        return torch.bincount(self.tokens[self.written].long(), minlength=vocab_size)


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
    speculator: Speculator, prefixes: Sequence[Tensor], seeds: list[int], spec: Distill, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue prefixes [P] of any length, row i with the noise of `seeds[i]`.

    `how` are further options of `generate`, such as another `eos_token_id` than the model's.
    Returns, on the CPU, the text [B, prefix_tokens + new_tokens], each row from column 0 on, its
    length [B], and its prefix's length [B].
    """
    if spec.temperature > 0:
        # generate's defaults, or the model's own config, would restrict the sampling.
        how |= {"temperature": spec.temperature, "seed": seeds, "top_k": 0, "top_p": 1.0}
    config: Any = speculator.model.generation_config
    end = how.get("eos_token_id", config.eos_token_id)
    counts = torch.tensor([len(prefix) for prefix in prefixes])
    width = int(counts.max())
    pads = width - counts  # [B], on the left
    device = speculator.model.device
    text = speculator.generate(
        pad_sequence(list(prefixes), batch_first=True, padding_side="left").to(device),
        attention_mask=(torch.arange(width) >= pads.unsqueeze(1)).long().to(device),
        max_new_tokens=spec.new_tokens,
        do_sample=spec.temperature > 0,
        **how,
    ).cpu()
    # A row's text ends with the first end-of-text after its prefix, that one included.
    new = text[:, width:]
    ends = torch.isin(new, torch.tensor([] if end is None else end))  # [B, new]
    lengths = counts + torch.where(ends.any(1), ends.byte().argmax(1) + 1, new.shape[1])
    # Training rows are padded on the right; the batch may also have ended early.
    columns = torch.arange(spec.prefix_tokens + spec.new_tokens)
    source = (columns + pads.unsqueeze(1)).clamp(max=text.shape[1] - 1)
    tokens = text.gather(1, source).masked_fill(columns >= lengths.unsqueeze(1), 0)
    return tokens, lengths, counts
