"""Processors that read the text before a row of logits, from tensors that a graph may repeat.

Each row of logits [M, V] has a text of its own, so the nodes of a tree are processed together, in
rows of different lengths, and nothing waits for the device, but for `FormsByRow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from .forms import FormsByRow


class Before(NamedTuple):
    """The texts before M rows of logits.

    Attributes:
        seen: [M, V] bool, the tokens that a repetition penalty is for; None without one.
        ids: [M, C] int64, of which the first `lengths` [M, 1] are the text; None where none of
            `OF_TEXT` is asked.
    """

    seen: Tensor | None = None
    ids: Tensor | None = None
    lengths: Tensor | None = None


class NGramsByRow(LogitsProcessor):
    """`NoRepeatNGramLogitsProcessor` with a size for each row.

    Attributes:
        ngram_size: [B, 1] int64; 0 for rows that may repeat themselves.
        most: the largest of them, or more.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu"):
        self.ngram_size = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.most = 1


class Unended(LogitsProcessor):
    """`MinLengthLogitsProcessor` with a length for each row, or one for all.

    Attributes:
        least: [B, 1] or [1, 1] int64; no shorter text is followed by an end token.
        ends: [E] int64, the end tokens.
    """

    def __init__(self, least: Tensor, ends: Tensor):
        self.least, self.ends = least, ends


class CountPenalty(LogitsProcessor):
    """The presence and frequency penalties of OpenAI's API, for the tokens written so far.

    A token's score is less by `presence` if the text holds it after its first `prompt` tokens, and
    by `frequency` for each time that it does so.

    Attributes:
        numbers: presence, frequency and prompt, three numbers; or [3, B, 1] float64, of each row.

    >>> text, scores = torch.tensor([[2, 0, 1, 1]]), torch.zeros(1, 3)
    >>> CountPenalty(1.0, 0.25, prompt=1)(text, scores).tolist()
    [[-1.25, -1.5, 0.0]]
    """

    def __init__(self, presence: float, frequency: float, prompt: int):
        self.numbers: Any = (presence, frequency, prompt)

    @classmethod
    def by_row(cls, batch: int, device: torch.device | str = "cpu") -> Self:
        """One that takes nothing off yet, see `write`."""
        found = cls(0.0, 0.0, 0)
        found.numbers = torch.zeros(3, batch, 1, dtype=torch.float64, device=device)
        return found

    def write(self, rows: Tensor, new: Sequence[tuple[float, float, int]]) -> None:
        """Give rows [R] these numbers."""
        own = torch.tensor([*zip(*new, strict=True)], dtype=torch.float64, device=rows.device)
        self.numbers.index_copy_(1, rows, own.unsqueeze(-1))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        lengths = torch.full_like(input_ids[:, :1], input_ids.shape[1])
        return _less_by_count(self, scores, Before(None, input_ids, lengths))


def penalise(scores: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """What the repetition penalty (Keskar et al. 2019, arXiv 1909.05858) makes of scores [M, V].

    Args:
        penalty: of all rows, or of each, [M, 1].

    >>> scores, seen = torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    >>> penalise(scores, seen, 2.0).tolist()
    [[1.5, -4.0, 1.0]]
    """
    if isinstance(penalty, Tensor):
        penalty = penalty.to(scores.dtype)
    less = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, less, scores)


def repeating(ids: Tensor, count: Tensor, size: int | Tensor, most: int, vocab: int) -> Tensor:
    """Which tokens would repeat an n-gram of their text, [M, V] bool.

    Those are the tokens that followed the last `size` - 1 ones before (Paulus et al. 2018, arXiv
    1705.04304).

    Args:
        ids: [M, C], of which the first `count` [M, 1] are the text.
        size: n, of all rows or of each, [M, 1]; 0 forbids nothing. `most`: the largest, or more.
        vocab: V.

    >>> ids, count = torch.tensor([[1, 2, 3, 1, 2, 2]]), torch.tensor([[5]])
    >>> for size in (0, 1, 2, 3, 4):
    ...     repeating(ids, count, size, 4, 5).nonzero()[:, 1].tolist()
    []
    [1, 2, 3]
    [3]
    [3]
    []
    """
    place = torch.arange(ids.shape[1], device=ids.device)  # [C]
    away = torch.arange(most - 1, 0, -1, device=ids.device)  # [n - 1]
    last = ids.gather(1, (count - away).clamp(min=0))  # [M, n - 1]
    windows = pad(ids, (most - 1, 0)).unfold(1, most, 1)  # [M, C, n], each ending at its place
    same = (windows[..., :-1] == last.unsqueeze(1)) | (away >= size).unsqueeze(-2)
    found = same.all(-1) & (place < count) & (place >= size - 1) & (size > 0)
    banned = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    # The last column takes what is not banned, and ids that the output layer does not have.
    tokens = torch.where(found, ids.clamp(max=vocab), vocab)
    return banned.scatter_(1, tokens, True)[:, :vocab]


def _without_ends(scores: Tensor, before: Before, least: int | Tensor, ends: Tensor) -> Tensor:
    """Scores [M, V] without end tokens [E] after texts of fewer than `least` tokens."""
    vocab = scores.shape[1]
    chosen = torch.zeros(vocab + 1, dtype=torch.bool, device=scores.device)
    known = torch.where((ends >= 0) & (ends < vocab), ends, vocab)
    chosen = chosen.index_fill_(0, known, True)[:vocab]
    assert before.lengths is not None
    return scores.masked_fill(chosen & (before.lengths < least), -torch.inf)


def _without_repeats(item: Any, scores: Tensor, before: Before) -> Tensor:
    assert before.ids is not None and before.lengths is not None
    size, vocab = item.ngram_size, scores.shape[1]
    most = item.most if type(item) is NGramsByRow else size
    found = repeating(before.ids, before.lengths, size, most, vocab)
    return scores.masked_fill(found, -torch.inf)


def _from_least(item: Any, scores: Tensor, before: Before) -> Tensor:
    if type(item) is Unended:
        return _without_ends(scores, before, item.least, item.ends)
    return _without_ends(scores, before, least_of(item), item.eos_token_id.to(scores.device))


def _less_by_count(item: Any, scores: Tensor, before: Before) -> Tensor:
    assert before.ids is not None and before.lengths is not None
    ids, vocab = before.ids, scores.shape[1]
    presence, frequency, prompt = item.numbers
    if isinstance(presence, Tensor):
        presence, frequency = presence.to(scores.dtype), frequency.to(scores.dtype)
    place = torch.arange(ids.shape[1], device=ids.device)  # [C]
    counts = (place >= prompt) & (place < before.lengths)  # [M, C]
    # The last column takes ids that the output layer does not have.
    times = torch.zeros(len(scores), vocab + 1, dtype=scores.dtype, device=scores.device)
    times = times.scatter_add_(1, ids.clamp(max=vocab), counts.to(scores.dtype))[:, :vocab]
    return scores - frequency * times - presence * (times > 0)


def _within_forms(item: FormsByRow, scores: Tensor, before: Before) -> Tensor:
    assert before.ids is not None and before.lengths is not None
    return item.within(before.ids, before.lengths, scores)


def least_of(item: Any) -> int:
    """How many tokens a text must have before it may end, by a processor of transformers."""
    if type(item) is hf.MinNewTokensLengthLogitsProcessor:
        return item.prompt_length_to_skip + item.min_new_tokens
    return item.min_length


LENGTHS = (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor)
"""The processors of transformers that `Unended` stands for."""

OF_TEXT: dict[type, Callable[[Any, Tensor, Before], Tensor]] = {
    hf.NoRepeatNGramLogitsProcessor: _without_repeats, NGramsByRow: _without_repeats,
    **dict.fromkeys((*LENGTHS, Unended), _from_least), CountPenalty: _less_by_count,
    FormsByRow: _within_forms,
}  # fmt: skip
"""What processors make of scores [M, V] with a text `Before` each row, by their exact class."""
