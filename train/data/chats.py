"""Chats as text, written by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplateError(ValueError):
    """A tokenizer cannot write a chat; the message does not quote it."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], answer: bool = True
) -> str:
    """A chat as the tokenizer's template writes it, special tokens included.

    Args:
        answer: whether the text ends with the beginning of the assistant's answer.

    Raises:
        ChatTemplateError: there is no template, or it refuses the chat.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ChatTemplateError("the tokenizer has no chat template")
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
