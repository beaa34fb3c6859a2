"""The form of calls whose arguments stand between tags, as Qwen 3.5 writes them:

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A text is written as it is and anything else as JSON; the reader tells them apart by the schema. A
value ends at a line that begins with its end tag. Within a line of JSON or of a text, that is part
of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstart.infer.grammars import json_options

from .shapes import Refused, shown

BEGIN, END = "<tool_call>", "</tool_call>"

_TEMPLATE = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    },
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_ENSURED = {
    "close_pattern": r"\n</function>\s*</tool_call>",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
}
_NOTES = {"title", "description", "default", "examples", "deprecated"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_PLAIN = {"string", "integer", "number", "boolean", "null"}
_DEFINED = ("$defs", "definitions")

_TEXT = [
    r'text[suffix="\n</parameter>"]: WITHOUT_END',
    r"WITHOUT_END: /(?s:.*)/ & ~/(?s:.*)\n<\/function>(?s:.*)/",
]
_NAMES = {
    **{str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"},
    **{list: "array", dict: "object"},
}
_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')


def are_tagged(field: Mapping[str, Any]) -> bool:
    """Whether the calls of a response template are written so."""
    return all(field.get(name) == value for name, value in _TEMPLATE.items())


def as_ensured(template: Mapping[str, Any]) -> dict[str, Any]:
    """A response template that reads the calls which the rules of `rules_of_tagged` ensure."""
    fields = template["fields"]
    return {**template, "fields": {**fields, "tool_calls": {**fields["tool_calls"], **_ENSURED}}}


def with_types(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose parameters have the types of what they refer to.

    The reader finds types in the schema of a parameter alone, without definitions.

    >>> of = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "object"}}}
    >>> with_types([{"name": "f", "parameters": of}])[0]["parameters"]
    {'properties': {'a': {'$ref': '#/$defs/x', 'type': ['object']}}}
    """
    found = []
    for tool in tools:
        function = tool.get("function", tool)
        whole = function.get("parameters") or {}
        known = whole.get("properties")
        known = known if isinstance(known, dict) else {}
        own = {
            key: {**value, "type": _types(value, whole)} if isinstance(value, dict) else value
            for key, value in known.items()
        }
        found.append({"name": function["name"], "parameters": {"properties": own}})
    return found


def rules_of_tagged(functions: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The rules `of_0`, `of_1`, … of a grammar: what stands between the marks of a call.

    Args:
        functions: names, and schemas of arguments.

    Raises:
        ValueError: arguments of that schema cannot be ensured in this form.
    """
    yield from _TEXT
    for number, (name, schema) in enumerate(functions):
        _check_name(name, f"the function {shown(name)}")
        if others := schema.keys() - _OF_OBJECTS - _NOTES - {"x-guidance", "$schema", "strict"}:
            raise _unsure(name, f"has {shown(min(others))}")
        known, required = schema.get("properties", {}), schema.get("required", [])
        if missing := [each for each in required if each not in known]:
            raise _unsure(name, f"requires {shown(missing[0])}, which is no property")
        body = [_literal(f"<function={name}>\n")]
        for key, value in known.items():
            _check_name(key, f"the parameter {shown(key)} of {shown(name)}")
            written = _written(value, schema)
            if written is None and key in required:
                raise _unsure(name, f"has {shown(key)}, which is neither plain text nor JSON")
            if written is not None:  # what need not be there is left out else
                one = f"{_literal(f'<parameter={key}>' + chr(10))} {written} {_literal(chr(10))}"
                body.append(one if key in required else f"({one})?")
        yield f"of_{number}: {' '.join(body)} {_literal('</function>')}"


def _written(schema: Any, whole: Mapping[str, Any]) -> str | None:
    """A value and the mark that ends it; None where it cannot be said what it may be.

    Args:
        whole: the schema of all arguments, with its definitions.
    """
    if not isinstance(schema, dict):
        return None
    members = schema.get("anyOf", [schema])
    if schema.keys() - {"anyOf"} - _NOTES and members != [schema]:
        return None
    members = [each if _narrows(each) else _found(each, whole) for each in members]
    ends = _literal("\n</parameter>")
    if all(_is_text(each) or each.get("type") == "null" for each in members):
        texts = [text for each in members for text in _texts(each)]
        return f"({' | '.join(map(_literal, texts))}) {ends}" if all(map(_whole, texts)) else None
    types = [_types(each, whole) for each in members]
    plain = all(each.keys() <= _NOTES | {"type"} for each in members)
    plain = plain and all(_PLAIN.issuperset(each) for each in types)
    if plain and any("string" in each or not each for each in types):
        return "text"
    if not all(types) or any("string" in each for each in types):
        return None
    own = {name: whole[name] for name in _DEFINED if name in whole}
    text = json.dumps(schema | own)
    if _ELSEWHERE.search(text):  # it would be another place in the parameter's own schema
        return None
    return f"%json {json.dumps(schema | own | {'x-guidance': json_options(text)})} {ends}"


def _narrows(schema: Any) -> bool:
    """Whether it says more of a value than what it refers to."""
    return isinstance(schema, dict) and bool(schema.keys() - {"$ref"} - _NOTES)


def _found(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The definition that a schema refers to, or itself."""
    at = str(schema.get("$ref", "")) if isinstance(schema, dict) else ""
    for name in _DEFINED:
        known = whole.get(name)
        if isinstance(known, dict) and at.startswith(f"#/{name}/"):
            schema = known.get(at.removeprefix(f"#/{name}/"), schema)
            break
    return schema if isinstance(schema, dict) else {}


def _types(schema: Any, whole: Mapping[str, Any], depth: int = 8) -> list[str]:
    """The types of JSON that a value may have, as far as its schema tells.

    Args:
        depth: so many schemas may refer to one another, which may be a circle.
    """
    schema = _found(schema, whole) if depth else {}
    if "$ref" in schema:
        return _types(schema, whole, depth - 1)
    if kinds := schema.get("type"):
        kinds = [kinds] if isinstance(kinds, str) else _listed(kinds)
        return [kind for kind in kinds if isinstance(kind, str)]
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else _listed(schema["enum"])
        return list(dict.fromkeys(_NAMES[type(value)] for value in values))
    for name in ("anyOf", "oneOf", "allOf"):
        members = [_types(each, whole, depth - 1) for each in _listed(schema.get(name))]
        if members and (name == "allOf" or all(members)):
            every = [kind for member in members for kind in member]
            return list(dict.fromkeys(every))
    return []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether it is one of some texts."""
    known = schema.keys() <= _NOTES | {"type", "enum", "const"}
    known = known and {"string"}.issuperset(_types(schema, {}))
    return known and bool(texts := _texts(schema)) and all(isinstance(text, str) for text in texts)


def _texts(schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("type") == "null":
        return ["null"]
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _whole(text: str) -> bool:
    """Whether the reader reads just this text."""
    return "\n</parameter>" not in text and "\n</function>" not in text


def _check_name(name: str, what: str) -> None:
    if not name or ">" in name or "\n" in name:
        said = f"{what} cannot be called: its name is empty, or has > or a line end"
        raise Refused(said, "tools", "invalid_function_parameters")


def _unsure(name: str, why: str) -> Refused:
    return Refused(
        f"the schema of {shown(name)} {why}; a call of it cannot be ensured with a target that "
        "writes arguments between tags: simplify it, or let the model choose",
        "tools",
        "invalid_function_parameters",
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
