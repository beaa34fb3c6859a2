"""Forms that texts shall have: after each text, the tokens with which it can still get its form.

Unlike other processors of `before`, one of forms reads the texts on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor


class Form(ABC):
    """What the text of one row shall be. It may keep what it has read of it."""

    @abstractmethod
    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        """Leave in `bits` the tokens that may follow a text.

        Args:
            text: [T] int64, any; mostly the last one and a token more.
            bits: [ceil(V / 8)] uint8, all set: a bit for each token, the lowest first; changed.

        Returns:
            False where no text of the form begins so.
        """


class FormsByRow(LogitsProcessor):
    """Gives a score of -inf to tokens with which a row's text cannot get its form any more.

    A text that cannot have it already gets scores of NaN, so that its row ends with an error.

    Attributes:
        forms: [B], None for rows whose text may be any.
    """

    def __init__(self, forms: Sequence[Form | None]):
        self.forms = list(forms)

    def write(self, rows: Tensor, new: Sequence[Form | None]) -> None:
        """Give rows [R] these forms."""
        for row, form in zip(rows.tolist(), new, strict=True):
            self.forms[row] = form

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return self.within(input_ids, torch.full_like(input_ids[:, :1], input_ids.shape[1]), scores)

    def within(self, ids: Tensor, lengths: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after the first `lengths` [B, 1] tokens of texts ids [B, C]."""
        if not any(self.forms):
            return scores
        count, vocabulary = lengths.flatten().tolist(), scores.shape[1]
        texts = ids[:, : max(count)].cpu().numpy()
        bits = np.full((len(texts), (vocabulary + 7) // 8), 255, dtype=np.uint8)
        broken = [
            form is not None and not form.allow(text[:length], own)
            for form, text, length, own in zip(self.forms, texts, count, bits, strict=True)
        ]
        places = torch.arange(8, dtype=torch.uint8, device=scores.device)
        allowed = torch.from_numpy(bits).to(scores.device).unsqueeze(-1) >> places & 1
        scores = scores.masked_fill(allowed.flatten(1)[:, :vocabulary] == 0, -torch.inf)
        if any(broken):
            lost = torch.tensor(broken, device=scores.device).unsqueeze(1)
            scores = scores.masked_fill(lost, torch.nan)
        return scores
