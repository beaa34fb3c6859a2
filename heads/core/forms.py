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

    def forced(self, text: np.ndarray) -> int:
        """The usual token by which a text goes on that can go on in one way; -1 for others."""
        return -1


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

    def allowed(
        self,
        rows: Sequence[int],
        texts: Sequence[np.ndarray],
        vocabulary: int,
        device: torch.device,
    ) -> tuple[Tensor, list[bool]]:
        """Which tokens may follow each of M texts, [M, V] bool.

        Args:
            rows: [M] the rows that the texts, [T] int64 each, are of.
            vocabulary: V.

        Returns:
            Also, for each, whether no text of its row's form begins so; any token may follow it.
        """
        bits = np.full((len(texts), (vocabulary + 7) // 8), 255, dtype=np.uint8)
        broken = []
        for row, text, own in zip(rows, texts, bits, strict=True):
            form = self.forms[row]
            broken.append(form is not None and not form.allow(text, own))
        bits[broken] = 255
        if device.type == "cpu":
            whole = np.unpackbits(bits, axis=1, count=vocabulary, bitorder="little")
            return torch.from_numpy(whole.view(bool)), broken
        places = torch.arange(8, dtype=torch.uint8, device=device)
        found = torch.from_numpy(bits).to(device).unsqueeze(-1) >> places & 1
        return found.flatten(1)[:, :vocabulary] > 0, broken

    def within(self, ids: Tensor, lengths: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after the first `lengths` [B, 1] tokens of texts ids [B, C]."""
        if not any(self.forms):
            return scores
        texts = texts_of(ids, lengths.flatten())
        rows = range(len(texts))
        allowed, broken = self.allowed(rows, texts, scores.shape[1], scores.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if any(broken):
            lost = torch.tensor(broken, device=scores.device).unsqueeze(1)
            scores = scores.masked_fill(lost, torch.nan)
        return scores


def texts_of(ids: Tensor, lengths: Tensor) -> list[np.ndarray]:
    """The first `lengths` [B] tokens of each row of ids [B, C], on the host."""
    count = lengths.tolist()
    texts = ids[:, : max(count)].cpu().numpy()
    return [text[:length] for text, length in zip(texts, count, strict=True)]
