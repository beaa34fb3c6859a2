"""What a request of the OpenAI protocol may ask: what would be ignored is refused by name.

An option that changes the answer, such as `best_of`, must not be accepted and then left out: its
sender would take the answer for what was asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .calls import must_call
from .probabilities import asked_probabilities
from .settings import FIELDS, SETTINGS, check_settings
from .shapes import Refused, check_shapes, shown, wrong

Body = Mapping[str, Any]

EXTRA = ("top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "structured_outputs")
"""Fields that are taken beside those of the protocol, by each endpoint."""

_TEMPLATE = "give chat_template_kwargs, if the model's template has a setting for this"
_TEXT_ALONE = "leave it out: text alone is written"
_NONE_KEPT = "send the whole conversation: none is kept"
_CALLS = "leave it out: the model decides how many functions it calls"
_STREAM = ("include_usage", "include_obfuscation")  # the latter for the network's sake alone
_UNAVAILABLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    # what of it asks for nothing, and what to do in place of it
    "best_of": (lambda n: n == 1, "leave it out: n answers are written, and all are returned"),
    "suffix": (lambda text: text == "", "put it into the prompt, in the model's own form"),
    "text": (lambda of: of.get("verbosity") is None, _TEMPLATE),
    "verbosity": (lambda of: False, _TEMPLATE),
    "modalities": (lambda of: of == ["text"], _TEXT_ALONE),
    "audio": (lambda of: False, _TEXT_ALONE),
    "functions": (lambda of: not of, "use tools"),
    "function_call": (lambda of: of == "none", "use tools"),
    "parallel_tool_calls": (lambda of: of is True, _CALLS),
    "max_tool_calls": (lambda of: False, _CALLS),
    "web_search_options": (lambda of: False, "leave it out: nothing is searched"),
    "reasoning_effort": (lambda of: False, _TEMPLATE),
    "reasoning": (lambda of: not any(of.values()), _TEMPLATE),
    "previous_response_id": (lambda of: not of, _NONE_KEPT),
    "conversation": (lambda of: not of, _NONE_KEPT),
    "context_management": (lambda of: not of, _NONE_KEPT),
    "moderation": (lambda of: not of, "leave it out: nothing is moderated"),
    "background": (lambda of: of is False, "leave it out: the answer is sent when it is written"),
    "stream_options": (
        lambda of: all(name in _STREAM and type(asked) is bool for name, asked in of.items()),
        "give include_usage, true or false: the usage is told once, at the end",
    ),
    "truncation": (lambda of: of == "disabled", "shorten the prompt yourself"),
}
_OTHER_NAMES = {
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "eos_token_id",
    "bad_words": "bad_words_ids",
    "ignore_eos": "eos_token_id",
}
"""Fields of other servers, and the settings of `generation_config` that do what they do."""

_OTHER_FORMS = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
"""The same of `structured_outputs`."""

_OF_TOKENIZER = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
}
"""What the server itself tells the tokenizer, such as the template; no setting of a template."""


def check_fields(body: Body, known: Collection[str]) -> None:
    """Refuse fields that no endpoint reads, rather than leave them out.

    Args:
        known: the fields of the protocol.

    Raises:
        ValueError: the name of a field that is neither there nor in `EXTRA`, and what to do.

    >>> check_fields({"prompt": "Hi", "min_tokens": 2}, {"prompt"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: 'min_tokens' is no field of this endpoint; give ...
    """
    for name in body.keys() - known - set(EXTRA):
        setting = name if name in SETTINGS else _OTHER_NAMES.get(name)
        remedy = f"leave it out; fields beside those of the protocol are {', '.join(EXTRA)}"
        if setting:
            remedy = f"give {setting} in generation_config"
        elif name in _OTHER_FORMS:
            remedy = f"give {_OTHER_FORMS[name]} in structured_outputs"
        said = f"{shown(name)} is no field of this endpoint; {remedy}"
        raise Refused(said, name, "unknown_parameter")


def check_asked(body: Body, template: Any, vocabulary: int | None = None) -> None:
    """Refuse what the server cannot do, rather than leave it out.

    Args:
        body: the request `without_nulls`; `messages` or `input` make it a chat.
        template: the chat template of the target's tokenizer, if it has one.
        vocabulary: how many token ids the target has, if that is known.

    Raises:
        ValueError: an option has another type or is out of its range, or would be ignored; or a
            chat, or tools, are nothing that the template knows.

    >>> check_asked({"prompt": "Hi", "best_of": 1}, None)
    >>> check_asked({"prompt": "Hi", "max_tokens": 0}, None)
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: max_tokens is 0; expected a whole number from 1
    """
    check_shapes(body)
    for name, (holds, wanted) in FIELDS.items():
        if name in body and not holds(body[name]):
            raise wrong(name, body[name], wanted)
    check_settings(body, vocabulary)
    if asked_probabilities(body) is not None and body.get("echo"):
        raise Refused(
            "echo is true, and there are no probabilities of a prompt; leave logprobs or echo out",
            "echo",
            "unsupported_value",
        )
    for name, (harmless, remedy) in _UNAVAILABLE.items():
        if name not in body:
            continue
        if name == "parallel_tool_calls" and (must_call(body) or not body.get("tools")):
            continue  # a form ensures it, or there is nothing to call
        if not harmless(body[name]):
            said = f"{name} is {shown(body[name])}, which this server cannot do; {remedy}"
            raise Refused(said, name, "unsupported_value")
    if ("messages" in body or "input" in body) and template is None:
        raise ValueError(
            "the target's tokenizer has no chat template, so it answers no chats; send the text as "
            "the prompt of /v1/completions"
        )
    if taken := body.get("chat_template_kwargs", {}).keys() & _OF_TOKENIZER:
        raise Refused(
            f"chat_template_kwargs has {shown(min(taken))}, which is no setting of a template; "
            "leave it out",
            "chat_template_kwargs",
        )
    if body.get("tools") and "tools" not in str(template):
        said = "the target's chat template has no place for tools; leave them out"
        raise Refused(said, "tools", "unsupported_value")
