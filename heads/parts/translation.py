"""Between two tokenizers: what a draft model reads for the target's tokens, and what it may draft.

Source: token-level intersection (Timor et al. 2025, arXiv 2502.05202). The draft model proposes the
tokens of which the target has one of the same bytes. What the target has written is read token by
token, each as the draft model's tokens of the same bytes, so no text is tokenized while decoding:

    target's tokens        The | quick | fox | es        of 4 tokens, `quick` is none of the drafts'
    the draft model reads  The | qu | ick | fox | es     its longest tokens, from the left
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core.spelling import spell

TABLES = ("pieces", "lengths", "ids", "names", "first")
TRANSLATION = tuple(f"translation.{table}" for table in TABLES)
"""The tables of a `Translation`, and what they are called beside the weights of a model."""

PIECES = 4
"""At most so many tokens are read for one of the target's; of longer ones, the last."""


class Translation(nn.Module):
    """What the tokens of two vocabularies are to each other; buffers that belong to no state dict.

    Args:
        pieces: [V, PIECES] int32, what the draft model reads for each of the target's tokens; those
            after the first `lengths` [V] are 0. Nothing is read for special tokens that the draft
            model does not have.
        ids: [Vd] int32, the tokens of the draft model that it proposes.
        names: [Vd] int64, the target's tokens that they stand for, ascending.
        first: [1] or [0] int64, what the draft model's texts begin with.
    """

    pieces: Tensor
    lengths: Tensor
    ids: Tensor
    names: Tensor
    first: Tensor

    def __init__(self, pieces: Tensor, lengths: Tensor, ids: Tensor, names: Tensor, first: Tensor):
        super().__init__()
        tables = (pieces, lengths, ids, names, first)
        for name, table in zip(TABLES, tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    @classmethod
    def between(cls, target: Any, own: Any, vocabulary: int, outputs: int) -> Self:
        """The translation between two tokenizers of transformers.

        Args:
            target, own: the target's and the draft model's.
            vocabulary, outputs: how many tokens the target and the draft model have logits for.
        """
        theirs, mine = _Vocabulary(target, vocabulary), _Vocabulary(own, outputs)
        pairs = {
            theirs.of_bytes[text]: token
            for text, token in mine.of_bytes.items()
            if text in theirs.of_bytes
        }
        pairs |= _same_specials(theirs, mine)
        read: list[list[int]] = [[] for _ in range(vocabulary)]
        for token, text in theirs.spelt.items():
            if token in pairs:
                read[token] = [pairs[token]]
            elif text not in theirs.special:
                read[token] = mine.split(text)[-PIECES:]
        padded = [each + [0] * (PIECES - len(each)) for each in read]
        pieces = torch.tensor(padded, dtype=torch.int32)
        lengths = torch.tensor([*map(len, read)], dtype=torch.int32)
        names = torch.tensor(sorted(pairs), dtype=torch.long)
        ids = torch.tensor([pairs[name] for name in names.tolist()], dtype=torch.int32)
        start = own("").input_ids[:1]
        first = torch.tensor(start if start == [own.bos_token_id] else [], dtype=torch.long)
        return cls(pieces, lengths, ids, names, first)

    def read(self, tokens: Tensor, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """What the draft model reads for tokens [B, A], of which `count` [B] are true.

        Returns:
            [B, width] int64 and how many of them are true, [B]; what does not fit is left out.
        """
        there = torch.arange(tokens.shape[1], device=tokens.device) < count.unsqueeze(1)  # [B, A]
        own = self.lengths[tokens].long() * there
        first = own.cumsum(1) - own  # [B, A] where each token's begin
        step = torch.arange(PIECES, device=tokens.device)
        place = (first.unsqueeze(-1) + step).where(step < own.unsqueeze(-1), width).clamp(max=width)
        found = tokens.new_zeros(len(tokens), width + 1)
        found.scatter_(1, place.flatten(1), self.pieces[tokens].long().flatten(1))
        return found[:, :width], own.sum(1).clamp(max=width)

    def read_prompt(self, tokens: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The same for prompts, after what texts begin with, in at most so many columns.

        Of what does not fit, the beginning is left out. The host waits for the lengths.
        """
        found, own = self.read(tokens, count, tokens.shape[1] * PIECES)
        if len(self.first):
            lacks = found[:, :1] != self.first  # [B, 1]
            longer = torch.cat([self.first.expand(len(found), -1), found], 1)
            found, own = longer.where(lacks, pad(found, (0, 1))), own + lacks.squeeze(1)
        width = min(int(own.max()), most)
        column = (own - width).clamp(min=0).unsqueeze(1)
        column = column + torch.arange(width, device=tokens.device)
        return found.gather(1, column), own.clamp(max=width)


class _Vocabulary:
    """A tokenizer's tokens by their bytes, those with an id below `count`.

    Attributes:
        spelt: the bytes of all tokens.
        of_bytes: tokens by their bytes, but for special ones.
        special: special tokens by their bytes.
    """

    def __init__(self, tokenizer: Any, count: int):
        self.tokenizer = tokenizer
        known = sorted({token for token in tokenizer.get_vocab().values() if token < count})
        self.spelt = dict(zip(known, spell(tokenizer, known), strict=True))
        added, special = tokenizer.added_tokens_decoder, {*tokenizer.all_special_ids}
        special |= {token for token, entry in added.items() if entry.special}
        self.special = {self.spelt[token]: token for token in known if token in special}
        # Of tokens with the same bytes, the last: bytes stand before characters of one byte.
        self.of_bytes = {
            text: token for token, text in self.spelt.items() if token not in special and text
        }
        self._longest = max(map(len, self.of_bytes), default=0)

    def split(self, text: bytes) -> list[int]:
        """The longest tokens, from the left; bytes that no token has are left out."""
        found, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token := self.of_bytes.get(text[start:end])) is not None:
                    found.append(token)
                    break
            else:
                end = start + 1
            start = end
        return found


def _same_specials(theirs: _Vocabulary, mine: _Vocabulary) -> dict[int, int]:
    """The target's special tokens that the draft model has too, by their text or their use."""
    pairs = {t: mine.special[text] for text, t in theirs.special.items() if text in mine.special}
    for use in ("eos_token_id", "bos_token_id"):
        one, other = getattr(theirs.tokenizer, use), getattr(mine.tokenizer, use)
        both = one in theirs.spelt and other in mine.spelt
        if both and one not in pairs and other not in pairs.values():
            pairs[one] = other
    return pairs
