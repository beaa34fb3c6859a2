"""Chats as text, written by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplateError(ValueError):
    """A tokenizer's template refuses a chat; the message does not quote the chat."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], answer: bool = True
) -> str:
    """A chat as the tokenizer's template writes it, special tokens included.

    Args:
        tokenizer: one with a `chat_template`.
        answer: whether the text ends with the beginning of the assistant's answer.

    Raises:
        ChatTemplateError: the template refuses the roles.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=answer, tokenize=False
        )
    except TemplateError:  # its message may quote the chat
        roles = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(
            f"the tokenizer's chat template refuses the roles {roles[:80]}"
        ) from None
    return str(text)
