"""The form of an answer that must call tools: `tool_choice` with a function, or `required`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import get_response_template

from headstart.infer import Grammar
from headstart.infer.grammars import json_options

from .shapes import Refused, shown, wrong
from .tagged_calls import BEGIN, END, are_tagged, rules_of_tagged

_CALL = {"type": "function", "function": "{content}"}
"""The transform of templates whose calls are JSON with `name` and `arguments`."""

_LITERAL = re.compile(r"(?:\\s\*)?((?:[\w\s<>/=:,\"'-]|\\\W)+)")
_WANTED = "'auto', 'none', 'required' or an object that names a function"


def must_call(body: Mapping[str, Any]) -> bool:
    """Whether a request wants an answer that calls tools."""
    return body.get("tool_choice", "auto") not in ("auto", "none")


def form_of_calls(body: Mapping[str, Any], tokenizer: Any, model: Any) -> Grammar:
    """The form of calls that a request wants, as the target writes calls by its response template.

    A function that is named is called once; of `required` ones there may be several calls, unless
    `parallel_tool_calls` is false.

    Raises:
        ValueError: what is wanted is none of the request's tools, their parameters are no schema,
            or the template's calls are neither JSON nor between tags.
    """
    functions = _functions(body)
    field = (get_response_template(tokenizer, model) or {}).get("fields", {}).get("tool_calls", {})
    tagged = are_tagged(field)
    marks = (BEGIN, END) if tagged else _marks(field)
    if marks is None:
        raise Refused(
            f"tool_choice is {shown(body['tool_choice'])}, and it is not known that the target "
            "writes calls as JSON or between tags, by its tokenizer's response_template; let the "
            "model choose",
            "tool_choice",
            "unsupported_value",
        )
    begin, end = (_spelled(mark, tokenizer) for mark in marks)
    several = body["tool_choice"] == "required" and body.get("parallel_tool_calls") is not False
    rules = [f"start: call{'+' if several else ''}"]
    numbers = " | ".join(f"of_{number}" for number in range(len(functions)))
    rules.append(f"call: /\\n{{0,2}}/ {begin} /\\n?/ ({numbers}) /\\n?/ {end}")
    rules += rules_of_tagged(functions) if tagged else _rules_of_json(functions)
    return Grammar.lark("\n".join(rules))


def _rules_of_json(functions: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    for number, (name, schema) in enumerate(functions):
        before = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        yield f'of_{number}: {before} %json {json.dumps(schema)} "}}"'


def _functions(body: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The names of functions that may be called, and the schemas of their arguments."""
    choice, found = body["tool_choice"], list[tuple[str, dict[str, Any]]]()
    for number, tool in enumerate(body.get("tools", ())):
        function = tool.get("function", tool)
        name = function["name"]
        schema = function.get("parameters") or {"type": "object", "additionalProperties": False}
        schema = {"type": "object"} | schema  # arguments are one, also if only its parts are given
        try:
            Grammar.json_schema(schema)
        except ValueError as error:
            at = f"tools[{number}].{'function.' * ('function' in tool)}parameters"
            said = f"the parameters of {shown(name)}: {error}"
            raise Refused(said, at, "invalid_function_parameters") from error
        found.append((name, schema | {"x-guidance": json_options(json.dumps(schema))}))
    if choice == "required":
        wanted = found
    else:
        named = choice.get("function", choice) if isinstance(choice, dict) else None
        if not isinstance(named, dict) or choice.get("type") != "function" or "name" not in named:
            raise wrong("tool_choice", choice, _WANTED)
        wanted = [each for each in found if each[0] == named["name"]]
    if not wanted:
        names = ", ".join(shown(name) for name, _ in found) or "none"
        said = f"tool_choice is {shown(choice)}, and the tools are: {names}"
        raise Refused(said, "tool_choice", "invalid_value")
    return wanted


def _marks(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """The texts before and after a call; None where calls are not written as JSON."""
    if field.get("content") != "json" or field.get("content_args"):
        return None
    begin, end = (_mark(field, side) for side in ("open", "close"))
    if begin is None or end is None or field.get("transform") != _CALL:
        return None
    return begin, end


def _mark(field: Mapping[str, Any], side: str) -> str | None:
    """The text that a region begins or ends with; None of a pattern that has several."""
    text = field.get(side)
    if isinstance(text, list):
        text = text[0]
    if text is None and (found := _LITERAL.fullmatch(field.get(f"{side}_pattern", ""))):
        text = re.sub(r"\\(\W)", r"\1", found[1])
    return text and text.strip()


def _spelled(mark: str, tokenizer: Any) -> str:
    """A mark in a grammar: its own token, if it has one."""
    token = tokenizer.added_tokens_encoder.get(mark)
    return json.dumps(mark, ensure_ascii=False) if token is None else f"<[{token}]>"
