"""Sampling settings of each row of a batch, in one processor for all rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from .before import LENGTHS, CountPenalty, NGramsByRow, Unended, least_of
from .forms import Form, FormsByRow
from .nucleus import top_p_by_row

_LEAST = 64  # a largest top_k is rounded up, to a power of two from here on


class RowSettings(NamedTuple):
    """Settings of one row, by the names that `generate` uses; the last six come first there.

    A temperature of 0 is greedy decoding. The default is the target's whole distribution.
    `min_length` counts the prompt; `token_bias` is what a `sequence_bias` or `bad_words_ids` adds
    to single tokens, `count_penalty` the numbers of a `CountPenalty`, and `form` that of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    token_bias: tuple[tuple[int, float], ...] = ()
    count_penalty: tuple[float, float, int] = (0.0, 0.0, 0)
    form: Form | None = None

    @classmethod
    def of(
        cls,
        processors: Iterable[LogitsProcessor] | None,
        sampled: bool,
        ends: Collection[int] = (),
    ) -> Self | None:
        """The settings that these processors of transformers stand for; None where none are.

        Args:
            ends: the end tokens, which a `min_length` is about.

        >>> warpers = [hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.9)]
        >>> RowSettings.of(warpers, True) == RowSettings(temperature=0.7, top_p=0.9)
        True
        >>> found = RowSettings.of([hf.NoRepeatNGramLogitsProcessor(3)], sampled=False)
        >>> found == RowSettings(temperature=0.0, no_repeat_ngram_size=3)
        True
        """
        found, left = dict[str, Any](), list[Any](processors or ())
        text = dict[str, Any]()
        bias = dict[int, float](left.pop(0).pairs if left and type(left[0]) is Biased else ())
        if left and type(left[0]) is hf.RepetitionPenaltyLogitsProcessor:
            if left[0].prompt_ignore_length:
                return None
            text["repetition_penalty"] = left.pop(0).penalty
        if left and type(left[0]) is hf.NoRepeatNGramLogitsProcessor:
            text["no_repeat_ngram_size"] = left.pop(0).ngram_size
        if left and type(left[0]) is Biased and all(b == -math.inf for _, b in left[0].pairs):
            bias |= left.pop(0).pairs  # what is forbidden stays so whatever comes before
        if bias:
            text["token_bias"] = tuple(bias.items())
        while left and type(left[0]) in LENGTHS:
            item = left.pop(0)
            if set(item.eos_token_id.tolist()) != set(ends):
                return None
            text["min_length"] = max(least_of(item), text.get("min_length", 0))
        if left and type(left[0]) is CountPenalty:
            text["count_penalty"] = left.pop(0).numbers
        if left and type(left[0]) is FormsByRow:
            (text["form"],) = left.pop(0).forms
        for name, kind in _KINDS.items():
            if left and type(left[0]) is kind:
                item = left.pop(0)
                if getattr(item, "min_tokens_to_keep", 1) != 1 or (
                    getattr(item, "filter_value", -math.inf) != -math.inf
                ):
                    return None
                found[name] = getattr(item, name)
        if left or (found and not sampled):
            return None
        return cls(**found, **text) if sampled else cls(0.0, **text)

    @property
    def apart(self) -> frozenset[str]:
        """The names of settings that `EachRow` does not have and that are not at their default."""
        usual = self._field_defaults
        return frozenset(name for name in self._fields[4:] if getattr(self, name) != usual[name])


_KINDS: dict[str, type[LogitsProcessor]] = {
    "temperature": hf.TemperatureLogitsWarper, "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper, "min_p": hf.MinPLogitsWarper,
}  # fmt: skip


class Biased(LogitsProcessor):
    """`SequenceBiasLogitsProcessor` of single tokens, with a bias for each row, or one for all.

    Attributes:
        bias: [B, V] or [1, V]; scores [M, V] are those of B rows, M / B after one another.
        pairs: the tokens with their bias that it was made of, if of one row.
    """

    def __init__(self, bias: Tensor, pairs: Iterable[tuple[int, float]] = ()):
        self.bias, self.pairs = bias, tuple(pairs)

    @classmethod
    def of(cls, pairs: Collection[tuple[int, float]], vocab: int, device: torch.device) -> Self:
        """A processor for all rows, of tokens below V = `vocab`."""
        found = cls(torch.zeros(1, vocab, device=device), pairs)
        found.write(torch.zeros(1, dtype=torch.long, device=device), [found.pairs])
        return found

    def write(self, rows: Tensor, new: Sequence[tuple[tuple[int, float], ...]]) -> None:
        """Give rows [R] these pairs of tokens and biases."""
        own = torch.zeros(len(new), self.bias.shape[1])  # in float32, as transformers has them
        for bias, pairs in zip(own, new, strict=True):
            for token, value in pairs:
                bias[token] = value
        self.bias.index_copy_(0, rows, own.to(self.bias))

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:  # type: ignore[override]
        bias = self.bias[:, : scores.shape[1]].to(scores.dtype).unsqueeze(1)  # [B, 1, V]
        return (scores.view(len(bias), -1, scores.shape[1]) + bias).view(scores.shape)


class EachRow(LogitsProcessor):
    """What the warpers of transformers make of scores, each row by settings of its own.

    Scores [M, V] are those of B rows, M / B after one another. Rows of temperature 0 stay as they
    are; `Sampling` adds no noise to them. The other settings have processors of their own, see
    `processors_by_row`: a drafter's proposals do not follow them.

    Attributes:
        numbers: [4, B] float64, the first fields of `RowSettings`.
        most: the largest top_k, rounded up; 0 where no row has one.
        nucleus, least: whether a row has a top_p, a min_p; greedy: whether one has temperature 0.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu"):
        default = torch.tensor(RowSettings()[:4], dtype=torch.float64, device=device)
        self.numbers = default.unsqueeze(1).repeat(1, batch)
        self.most, self.nucleus, self.least, self.greedy = 0, False, False, False

    def write(self, rows: Tensor, settings: Sequence[RowSettings]) -> None:
        """Give rows [R] these settings."""
        some = [each[:4] for each in settings]
        numbers = torch.tensor(some, dtype=torch.float64, device=rows.device)
        self.numbers.index_copy_(1, rows, numbers.T)

    def note(self, settings: Iterable[RowSettings]) -> None:
        """Do from now on what these settings need, which are those of all rows that go on."""
        found = list(settings)
        most = max((each.top_k for each in found), default=0)
        self.most = max(_LEAST, 1 << (most - 1).bit_length()) if most else 0
        self.nucleus = any(each.top_p < 1 for each in found)
        self.least = any(each.min_p > 0 for each in found)
        self.greedy = any(each.temperature == 0 for each in found)

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:  # type: ignore[override]
        temperature, top_k, top_p, min_p = self._for_each(scores)
        scores = scores / temperature.to(scores.dtype)
        if self.most:
            best = scores.topk(min(self.most, scores.shape[-1]), dim=-1).values
            place = (top_k.long() - 1).clamp(0, best.shape[-1] - 1)
            gone = (scores < best.gather(1, place)) & (top_k > 0)
            scores = scores.masked_fill(gone, -torch.inf)
        if self.nucleus:
            some = top_p < 1
            # A kernel is slowest for a p of 1, and quick for 0; those rows stay as they are.
            found = top_p_by_row(scores, (top_p * some).squeeze(1))
            scores = torch.where(some, found, scores)
        if self.least:
            chances = scores.softmax(-1)
            gone = chances < min_p.to(scores.dtype) * chances.amax(-1, keepdim=True)
            scores = scores.masked_fill(gone, -torch.inf)
        return scores

    def _for_each(self, scores: Tensor) -> Iterable[Tensor]:
        """The four numbers for each row of scores, [M, 1] each; a temperature of 0 becomes 1."""
        count = len(scores) // self.numbers.shape[1]
        numbers = self.numbers.unsqueeze(-1).expand(-1, -1, count).reshape(4, -1, 1)
        temperature, *others = numbers
        return temperature.masked_fill(temperature == 0, 1.0), *others


def processors_by_row(
    batch: int,
    device: torch.device | str,
    apart: Collection[str],
    sampled: bool,
    vocab: int,
    ends: Sequence[int] = (),
) -> LogitsProcessorList:
    """The processors of rows that have settings of their own, in the order of `generate`.

    Args:
        apart: the names of settings that a row may have, see `RowSettings.apart`.
        sampled: whether a row may have a temperature.
        vocab: V, or more; ends: the end tokens.
    """
    found = LogitsProcessorList()
    if "token_bias" in apart:
        found.append(Biased(torch.zeros(batch, vocab, device=device)))
    if "repetition_penalty" in apart:
        penalty: Any = hf.RepetitionPenaltyLogitsProcessor(1.0)
        penalty.penalty = torch.ones(batch, 1, dtype=torch.float64, device=device)
        found.append(penalty)
    if "no_repeat_ngram_size" in apart:
        found.append(NGramsByRow(batch, device))
    if "min_length" in apart:
        least = torch.zeros(batch, 1, dtype=torch.long, device=device)
        found.append(Unended(least, torch.tensor([*ends], dtype=torch.long, device=device)))
    if "count_penalty" in apart:
        found.append(CountPenalty.by_row(batch, device))
    if "form" in apart:
        found.append(FormsByRow([None] * batch))
    if sampled:
        found.append(EachRow(batch, device))
    return found


_WRITTEN: dict[type, tuple[str, str]] = {
    # a setting, and the tensor [B, 1] that has it for each row
    hf.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    NGramsByRow: ("no_repeat_ngram_size", "ngram_size"),
    Unended: ("min_length", "least"),
}


def write_rows(processors: Iterable[Any], rows: Tensor, new: Sequence[RowSettings]) -> None:
    """Give rows [R] new settings, in the processors of `processors_by_row`."""
    for item in processors:
        if isinstance(item, EachRow):
            item.write(rows, new)
        elif isinstance(item, Biased):
            item.write(rows, [each.token_bias for each in new])
        elif isinstance(item, CountPenalty):
            item.write(rows, [each.count_penalty for each in new])
        elif isinstance(item, FormsByRow):
            item.write(rows, [each.form for each in new])
        else:
            setting, name = _WRITTEN[type(item)]
            own, every = [[getattr(each, setting)] for each in new], getattr(item, name)
            every.index_copy_(0, rows, torch.tensor(own, dtype=every.dtype, device=rows.device))


def note_rows(processors: Iterable[LogitsProcessor], every: Iterable[RowSettings]) -> None:
    """Let them do from now on what these settings need, which are those of all rows that go on."""
    settings = list(every)
    for item in processors:
        if isinstance(item, EachRow):
            item.note(settings)
        elif isinstance(item, NGramsByRow):
            most = max((each.no_repeat_ngram_size for each in settings), default=0)
            item.most = 1 << (most - 1).bit_length() if most else 1
