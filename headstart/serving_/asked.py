"""What a request of the OpenAI protocol may ask: what would be ignored is refused by name.

An option that changes the answer, such as `n`, must not be accepted and then left out: its sender
would take the answer for what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Body = Mapping[str, Any]

_TEMPLATE = "give chat_template_kwargs, if the model's template has a setting for this"
_UNAVAILABLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    # what of it asks for nothing, and what to do in place of it
    "n": (lambda n: n == 1, "send a request for each answer, with seeds of their own"),
    "best_of": (lambda n: n == 1, "send a request for each answer, with seeds of their own"),
    "logprobs": (lambda value: value is False, "leave it out: no probabilities are returned"),
    "top_logprobs": (lambda n: n == 0, "leave it out: no probabilities are returned"),
    "echo": (lambda value: value is False, "put the prompt before the answer yourself"),
    "presence_penalty": (lambda value: value == 0, "use frequency_penalty, or leave it out"),
    "response_format": (lambda of: of == {"type": "text"}, "describe the form in a message"),
    "text": (lambda of: of.get("format", {}).get("type", "text") == "text", "describe the form"),
    "functions": (lambda of: not of, "use tools"),
    "function_call": (lambda of: of == "none", "use tools"),
    "tool_choice": (lambda of: of == "auto", "leave tools out, or let the model choose"),
    "reasoning_effort": (lambda of: False, _TEMPLATE),
    "previous_response_id": (lambda of: not of, "send the whole conversation: none is kept"),
}

_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda t: t >= 0, "a number from 0"),
    "top_p": (lambda p: 0 <= p <= 1, "a number from 0 to 1"),
    "max_tokens": (lambda n: n >= 1, "a whole number from 1"),
    "max_completion_tokens": (lambda n: n >= 1, "a whole number from 1"),
    "max_output_tokens": (lambda n: n >= 1, "a whole number from 1"),
}


def check_asked(body: Body, template: Any) -> None:
    """Refuse what the server cannot do, rather than leave it out.

    Args:
        body: the request; `messages` or `input` make it a chat.
        template: the chat template of the target's tokenizer, if it has one.

    Raises:
        ValueError: an option is out of its range, or would be ignored; or a chat, or tools, are
            nothing that the template knows.

    >>> check_asked({"prompt": "Hi", "n": 1, "logprobs": None}, None)
    >>> check_asked({"prompt": "Hi", "max_tokens": 0}, None)
    Traceback (most recent call last):
    ...
    ValueError: max_tokens is 0; expected a whole number from 1
    """
    for name, (holds, wanted) in _NUMBERS.items():
        value = body.get(name)
        if value is not None and not (_is_number(value) and holds(value)):
            raise ValueError(f"{name} is {value!r}; expected {wanted}")
    for name, (harmless, remedy) in _UNAVAILABLE.items():
        value = body.get(name)
        if name == "tool_choice" and not body.get("tools"):
            continue
        if value is not None and not harmless(value):
            raise ValueError(f"{name} is {value!r}, which this server cannot do; {remedy}")
    if body.get("logit_bias") and "prompt" in body:
        raise ValueError("logit_bias is for chats alone on this server; leave it out")
    if ("messages" in body or "input" in body) and template is None:
        raise ValueError(
            "the target's tokenizer has no chat template, so it answers no chats; send the text as "
            "the prompt of /v1/completions"
        )
    if body.get("tools") and "tools" not in str(template):
        raise ValueError("the target's chat template has no place for tools; leave them out")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
