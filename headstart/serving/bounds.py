"""How large a request may be, which is known before anything of it is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headstart.heads.core import trained_context

from .shapes import Refused

_ESCAPED = 6  # bytes of a body for one of its texts, which may be written \u0061
_BESIDE = 1 << 20  # bytes of a body for what is not the prompt
_LEAST = 1 << 16  # bytes of a prompt that are always tokenized
_UNBOUNDED = 1 << 26  # bytes of a body where the target has no context


class Bounds(NamedTuple):
    """Bytes of a request, at most.

    A prompt's is what the context would hold of the longest token. That is more than fits of any
    ordinary text, and little enough to be tokenized fast.

    Attributes:
        body: of the whole request; prompt: of the text that must fit, None without a bound.
        context: tokens that the target was made for.
    """

    body: int
    prompt: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Bounds:
        """Those of a target, with the tokenizer's longest token."""
        context = trained_context(model)
        if context is None:
            return cls(_UNBOUNDED)
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        prompt = max(context * longest, _LEAST)
        return cls(prompt * _ESCAPED + _BESIDE, prompt, context)

    def check_prompt(self, body: Mapping[str, Any]) -> None:
        """Refuse a request whose prompt cannot fit into the context.

        Answers in a chat are not counted: templates may leave parts of them out.

        Raises:
            ValueError: it has more bytes than the bound.
        """
        if self.prompt is None:
            return
        size = sum(len(text.encode()) for text in _texts(body))
        if size > self.prompt:
            raise Refused(
                f"the prompt has {size:,} bytes, and the target was made for {self.context:,} "
                f"tokens in all, which are at most {self.prompt:,} bytes; shorten it",
                next(name for name in ("messages", "prompt", "input") if name in body),
                "context_length_exceeded",
            )


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a request that a target reads whole."""
    for name in ("prompt", "instructions", "input"):
        if isinstance(text := body.get(name), str):
            yield text
    given = body.get("messages") or body.get("input")
    for item in given if isinstance(given, list) else ():
        if item.get("role") == "assistant" or item.get("type") == "reasoning":
            continue
        for name in ("text", "content", "output"):
            content = item.get(name)
            for part in content if isinstance(content, list) else [{"text": content}]:
                if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                    yield text
