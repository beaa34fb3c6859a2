"""Scores and logits of the text, as `generate` returns them, kept beside the decode loop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig


class Record:
    """The target's scores and logits of each emitted token, round by round.

    Args:
        scores: keep the processed scores; logits: keep the raw logits. Both in float32.
    """

    def __init__(self, scores: bool, logits: bool):
        self.wanted = {"scores": scores, "logits": logits}
        self._rounds: list[dict[str, Tensor]] = []
        self._counts: list[np.ndarray] = []

    @classmethod
    def asked(cls, config: GenerationConfig) -> Record | None:
        """The record that a generation config asks for; None where it asks for none."""
        wanted = bool(config.output_scores), bool(config.output_logits)
        return cls(*wanted) if config.return_dict_in_generate and any(wanted) else None

    def note(self, path: Tensor, **found: Tensor) -> None:
        """Keep of `scores` and `logits` [B, N, V] the nodes of a round's accepted path [B, A]."""
        kept = {}
        for name, values in found.items():
            if self.wanted[name]:
                index = path.unsqueeze(-1).expand(-1, -1, values.shape[-1])
                kept[name] = values.gather(1, index).float()  # [B, A, V]
        self._rounds.append(kept)

    def count(self, count: np.ndarray) -> None:
        """Say how many of the last path's entries emitted a token, [B]."""
        self._counts.append(count)

    def steps(self, new: int, pad: int) -> dict[str, tuple[Tensor, ...]]:
        """Scores, logits or both, as wanted: one [B, V] for each of `new` tokens.

        A row that has ended gets rows of -inf with 0 at the padding token, a certain choice of it.
        """
        return {name: self._steps(name, new, pad) for name in self.wanted if self.wanted[name]}

    def _steps(self, name: str, new: int, pad: int) -> tuple[Tensor, ...]:
        first = self._rounds[0][name]
        batch, _, vocab = first.shape
        out = torch.full((new, batch, vocab), -torch.inf, device=first.device)
        out[:, :, pad] = 0
        start = torch.zeros(batch, dtype=torch.long, device=first.device)
        for emitted, kept in zip(self._counts, self._rounds, strict=True):
            count = torch.from_numpy(emitted).to(first.device)
            steps = torch.arange(kept[name].shape[1], device=first.device)
            at = start.unsqueeze(1) + steps  # [B, A]
            row, step = ((steps < count.unsqueeze(1)) & (at < new)).nonzero(as_tuple=True)
            out[at[row, step], row] = kept[name][row, step]
            start = start + count
        return out.unbind(0)
