"""Prompts longer than a measurement should prefill: whole documents are cut, and one is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headstart.heads.core import counted
from headstart.inputs import encode
from headstart.terminal import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from headstart.infer import Speculator

TAKEN = 512
"""Tokens that are the prompt of a text which does not fit into the context as a whole."""

_LONG = 2048  # tokens of a prompt from which on the cost of prefilling is told


def room_for(model: PreTrainedModel, new_tokens: int) -> int | None:
    """Tokens that a prompt may have; None where the target's config knows no limit."""
    from headstart.heads.core import trained_context

    context = trained_context(model)
    return None if context is None else context - new_tokens


def is_cut(document: Any, length: int, room: int | None) -> bool:
    """Whether a prompt is a text, and not a chat, that is longer than there is room for."""
    return document.messages is None and room is not None and length > room


def taken(room: int | None) -> int:
    """How many tokens are the prompt of a text that is cut."""
    return min(TAKEN, room or TAKEN)


def without_oldest_turn(document: Any) -> Any:
    """A chat without its first message of the user's and what answers it; None for a single one.

    A system message stays.
    """
    from headstart.train.data.documents import plain_chat

    messages = document.messages or []
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if len(asked) < 2:
        return None
    rest = [each for each in messages[: asked[0]] if each["role"] == "system"]
    rest += messages[asked[1] :]
    return replace(document, text=plain_chat(rest), messages=rest)


def prompts_of(
    documents: Sequence[Any], speculator: Speculator, limit: int | None, new_tokens: int
) -> tuple[list[Tensor], list[str]]:
    """Token ids [1, T] of prompts, each text cut where it does not fit, and what `notes_on` says.

    Raises:
        UsageError: a chat, or `limit` tokens of a text, leave no room for the new tokens.
    """
    room = room_for(speculator.model, new_tokens)
    found: list[Any] = [encode(document, speculator, limit) for document in documents]
    cut = 0
    for place, document in enumerate(documents):
        length = found[place].shape[1]
        if limit is None and is_cut(document, length, room):
            cut += 1
            found[place] = found[place][:, : taken(room)]
        elif room is not None and length > room:
            raise UsageError(
                f"{document.id}: the prompt has {counted(length, 'token')}, and with {new_tokens} "
                f"more the target's context has room for {room:,}; cut prompts with --prefix-tokens"
            )
    return found, notes_on([ids.shape[1] for ids in found], cut, room, speculator)


def notes_on(
    lengths: Sequence[int], cut: int, room: int | None, speculator: Speculator
) -> list[str]:
    """What is to be told of prompts of so many tokens, `cut` of which were cut to `TAKEN`."""
    found, longest = [], max(lengths)
    if cut:
        found.append(
            f"{cut} of {len(lengths)} texts are longer than the {room:,} tokens that the target's "
            f"context has room for: their first {taken(room)} are the prompts "
            "(--prefix-tokens takes another number)."
        )
    if longest > _LONG:
        found.append(
            f"The prompts have {sum(lengths):,} tokens, up to {longest:,}, and each measurement "
            f"prefills them; keys and values of the longest take about "
            f"{speculator.target.cache.bytes_of(1, longest) / 1e9:.2g} GB (--prefix-tokens cuts "
            "them)."
        )
    return found
