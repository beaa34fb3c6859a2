"""Whether rows teach what the assistant writes and nothing else, and what they are made with.

Rows are read back as text and compared with the chats that they were made from, so nothing here
depends on how they were made.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.core import end_tokens

from ..data.documents import ChatTemplateError, Document, Message, render_chat
from .findings import Finding

_TELLING = 8  # characters of a message that are long enough to be told from chance
_GAIN = 0.1  # nats a token by which text in its order must be likelier than in none
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class ShownRow:
    """A training row as it is shown and checked."""

    tokens: list[int]
    supervised: list[bool]
    document: Document | None  # that it was made from, where that is known

    def spans(self) -> Iterator[tuple[bool, list[int]]]:
        """Its tokens in order, in stretches that are supervised or not."""
        first = 0
        for at in range(1, len(self.tokens) + 1):
            if at == len(self.tokens) or self.supervised[at] != self.supervised[first]:
                yield self.supervised[first], self.tokens[first:at]
                first = at


def masks_fit(tokenizer: PreTrainedTokenizerBase, rows: Sequence[ShownRow]) -> Finding:
    """Every row supervises something, and none a turn of the user's or the system's."""
    taught = sum(sum(row.supervised) for row in rows)
    tokens = sum(len(row.tokens) for row in rows)
    if not rows or not all(any(row.supervised) for row in rows):
        return Finding(
            "loss mask", False,
            f"{len(rows)} rows, and {sum(any(row.supervised) for row in rows)} of them teach "
            "anything; expected chats with turns of the assistant's",
        )  # fmt: skip
    for number, row in enumerate(rows, start=1):
        messages = row.document.messages if row.document else None
        if messages and (role := _taught_of_others(tokenizer, row, messages)):
            return Finding(
                "loss mask", False,
                f"row {number} trains on a turn of the {role}'s; only what the assistant writes "
                "may be a label",
            )  # fmt: skip
    return Finding("loss mask", True, f"{taught} of {tokens} tokens in {len(rows)} rows are labels")


def _taught_of_others(
    tokenizer: PreTrainedTokenizerBase, row: ShownRow, messages: Sequence[Message]
) -> str | None:
    """Whose turn, other than the assistant's, a row supervises.

    A turn counts where its text is found supervised more often than answers of the chat hold it.
    """
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    parts = [(on, str(tokenizer.decode(ids))) for on, ids in row.spans()]
    taught = "\n".join(text for on, text in parts if on)
    whole = str(tokenizer.decode(row.tokens))
    for message in messages:
        if message["role"] == "assistant":
            continue
        content = message["content"].strip()
        for line in [content, *content.splitlines()]:
            if len(line) < _TELLING or any(line in answer for answer in said):
                continue
            # The target may repeat the question in its answer: then it stands there twice.
            if line in taught and taught.count(line) >= whole.count(line):
                return message["role"]
    return None


def template_fits(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, rows: Sequence[ShownRow]
) -> Finding:
    """The template's marks are tokens of their own, and answers end where the target stops."""
    if not tokenizer.chat_template:
        return Finding("chat template", None, "the tokenizer has none; chats are plain text")
    chats = [row for row in rows if row.document is not None and row.document.messages]
    if not chats:
        return Finding("chat template", None, "the corpus holds no chats")
    text = "".join(str(tokenizer.decode(row.tokens)) for row in chats)
    said = "".join(m["content"] for row in chats for m in (row.document.messages or []))  # type: ignore[union-attr]
    for mark in sorted(set(_MARKER.findall(text))):
        if mark not in said and len(tokenizer(mark, add_special_tokens=False)["input_ids"]) > 1:
            return Finding(
                "chat template", False,
                f"its mark {mark} is no token of the tokenizer: the target was trained with "
                "another template",
            )  # fmt: skip
    own: Any = tokenizer.eos_token_id
    ends = end_tokens(target) | ({own} - {None})
    after = _after_answer(tokenizer, _answered(tokenizer))
    if ends and not ends & set(after):
        names = ", ".join(sorted(tokenizer.convert_ids_to_tokens(sorted(ends))))
        return Finding(
            "chat template", False,
            f"it ends an answer without a token at which the target stops ({names}): the target "
            "was trained with another template",
        )  # fmt: skip
    return Finding("chat template", True, "its marks are tokens, and answers end where it stops")


def _answered(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a chat of one question, whose answer is `Yes`, as the template writes it."""
    question = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes"}]
    ids: Any = tokenizer(render_chat(tokenizer, question), add_special_tokens=False)["input_ids"]
    return list(ids)


def _after_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The ids of a rendered chat behind its answer `Yes`."""
    for start in range(len(ids), 0, -1):
        if "Yes" in tokenizer.decode(ids[start - 1 :]):
            return ids[start:]
    return ids


@torch.no_grad()
def tokenizer_fits(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, texts: Sequence[Tensor]
) -> Finding:
    """The target knows the text in its order from the same tokens in none.

    With another tokenizer's ids it does not: they are numbers without meaning to it. (Nor does a
    target that was never trained.) The tokenizer may have tokens that the target has no embedding
    for, such as a picture's, if neither the texts nor the chat template have them.

    Args:
        texts: token ids [T] of the corpus.
    """
    known = target.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    every = torch.cat([*texts, _of_template(tokenizer)])
    largest = int(every.max()) if len(every) else -1
    if largest >= known:
        return Finding(
            "tokenizer", False,
            f"the corpus or the chat template has token {largest:,} of its {len(tokenizer):,}, and "
            f"the target's embedding {known:,} rows: it is another model's",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    nats = {"own": 0.0, "none": 0.0}
    tokens = 0
    for text in texts:
        mixed = text[torch.randperm(len(text), generator=generator)]
        for name, ids in (("own", text), ("none", mixed)):
            batch = ids[None].to(target.device)
            nats[name] += float(target(input_ids=batch, labels=batch).loss) * (len(ids) - 1)
        tokens += len(text) - 1
    if tokens < 16:
        return Finding("tokenizer", None, "the corpus' texts are too short")
    own, none = (value / tokens for value in nats.values())
    counts = Counter(int(i) for text in texts for i in text)
    said = f"the corpus costs {own:.2f} nats per token, with shuffled tokens {none:.2f}"
    fine = math.isfinite(own) and none - own >= _GAIN and len(counts) > 1
    if not fine:
        said += ": it is noise to the target, which has another tokenizer, or was hardly trained"
    elif (more := len(tokenizer) - known) > 0:
        said += f"; {more:,} of its tokens have no embedding, and are in no text"
    return Finding("tokenizer", fine, said)


def _of_template(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The ids [T] of a chat; none without a template, or where that refuses it."""
    try:
        ids = _answered(tokenizer) if tokenizer.chat_template else []
    except ChatTemplateError:
        ids = []
    return torch.tensor(ids, dtype=torch.int64)
