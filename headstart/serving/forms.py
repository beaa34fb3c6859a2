"""The form that a request wants its answer in: `response_format` and what does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers.cli.serving.utils import get_response_template

from headstart.infer import Grammar

from .calls import form_of_calls, must_call
from .reading import THOUGHTS
from .shapes import Refused, without_nulls, wrong

_OUTPUTS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda asked: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
_TEXTS = ("regex", "grammar")

_WANTED = "an object of the type text, json_object or json_schema"


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """What a request wants its answer to be; None for any text.

    Read are `response_format`, `text.format` of /v1/responses, and `structured_outputs`, which has
    one of `json` (a schema), `json_object` (true), `regex`, `choice` (texts) and `grammar` (Lark).

    Raises:
        ValueError: what it wants is nothing that there is, or more than one of them, or there are
            tools, whose calls have a form of their own.

    >>> grammar_of({"response_format": {"type": "text"}})
    >>> grammar_of({"response_format": {"type": "xml"}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: response_format is {'type': 'xml'}; expected an ...
    """
    found: dict[str, Grammar] = {}
    if "response_format" in body:
        _add(found, "response_format", body["response_format"], "json_schema")
    if "text" in body:
        if body["text"].keys() - {"format", "verbosity"}:
            raise wrong("text", body["text"], "an object with format")
        _add(found, "text.format", body["text"].get("format") or {"type": "text"}, None)
    if "structured_outputs" in body:
        found["structured_outputs"] = _output(body["structured_outputs"])
    if len(found) > 1:
        raise Refused(f"the request has {' and '.join(found)}; give one of them", [*found][-1])
    for name in found:
        if body.get("tools"):
            said = f"the request has {name} and tools, which could not be called then"
            raise Refused(f"{said}; leave one of them out", name, "unsupported_value")
    return next(iter(found.values()), None)


def answer_form(body: Mapping[str, Any], tokenizer: Any, model: Any) -> Grammar | None:
    """`grammar_of` a request to a model, after the thoughts by which it may begin a chat's answer;
    or the form of the calls that it must make.

    Raises:
        ValueError: see `grammar_of` and `form_of_calls`.
    """
    grammar = grammar_of(body)
    if must_call(body):
        grammar = form_of_calls(body, tokenizer, model)
    if grammar is None or "prompt" in body or not (marks := thoughts_of(tokenizer, model)):
        return grammar
    return grammar.after_thoughts(*marks)


def _add(found: dict[str, Grammar], name: str, form: Any, inside: str | None) -> None:
    """Add a form of the protocol, whose schema stands `inside` an object of its own, or in it."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        found[name] = Grammar.json_object()
    elif kind == "json_schema":
        holder = form if inside is None else form.get(inside)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            at = f"{name}.schema" if inside is None else f"{name}.{inside}.schema"
            raise wrong(at, schema, "a JSON schema, an object")
        found[name] = _made(name, Grammar.json_schema, schema)
    elif kind != "text":
        raise wrong(name, form, _WANTED)


def _output(asked: Any) -> Grammar:
    known = ", ".join(_OUTPUTS)
    if isinstance(asked, dict):  # clients may send all of vLLM's fields
        asked = without_nulls(asked)
    if not isinstance(asked, dict) or len(asked) != 1 or not asked.keys() <= _OUTPUTS.keys():
        raise wrong("structured_outputs", asked, f"an object with one of {known}")
    ((name, value),) = asked.items()
    at = f"structured_outputs.{name}"
    if name in _TEXTS and not isinstance(value, str):
        raise wrong(at, value, "a text")
    if name == "json_object" and value is not True:
        raise wrong(at, value, "true")
    return _made(at, _OUTPUTS[name], value)


def _made(name: str, make: Callable[[Any], Grammar], given: Any) -> Grammar:
    try:
        return make(given)
    except ValueError as error:
        raise Refused(f"{name}: {error}", name, "invalid_value") from error


def thoughts_of(tokenizer: Any, model: Any) -> tuple[str, str] | None:
    """The texts between which a model thinks before it answers, if it is known to."""
    fields = (get_response_template(tokenizer, model) or {}).get("fields", {})
    for name in THOUGHTS:
        begin, end = (fields.get(name, {}).get(key) for key in ("open", "close"))
        if isinstance(begin, str) and isinstance(end, str):
            return begin, end
    return None
