"""The form of calls whose arguments stand between tags, as Qwen 3.5 writes them:

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A text is written as it is and anything else as JSON; the reader tells them apart by the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstart.infer.grammars import json_options

from .shapes import shown

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
_NOTES = {"title", "description", "default", "examples", "deprecated"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_PLAIN = {"string", "integer", "number", "boolean", "null"}
_DEFINED = ("$defs", "definitions")

_TEXT = [
    'text[suffix="</parameter>"]: WITHOUT_END',
    r"WITHOUT_END: /(?s:.*)/ & ~/(?s:.*)<\/function>(?s:.*)/",
]


def are_tagged(field: Mapping[str, Any]) -> bool:
    """Whether the calls of a response template are written so."""
    return all(field.get(name) == value for name, value in _TEMPLATE.items())


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
    members = [_found(each, whole) for each in members]
    ends = _literal("\n</parameter>")
    if all(_is_text(each) or each.get("type") == "null" for each in members):
        texts = [text for each in members for text in _texts(each)]
        return f"({' | '.join(map(_literal, texts))}) {ends}" if all(map(_whole, texts)) else None
    plain = all(each.keys() <= _NOTES | {"type"} and _types(each) <= _PLAIN for each in members)
    if plain and any("string" in _types(each) or not _types(each) for each in members):
        return "text"
    # The reader finds types in the schema itself, without its definitions.
    types = [_types(each) for each in schema.get("anyOf", [schema])]
    if not all(types) or any("string" in each for each in types):
        return None
    own = {name: whole[name] for name in _DEFINED if name in whole}
    own = schema | own
    return f"%json {json.dumps(own | {'x-guidance': json_options(json.dumps(own))})} {ends}"


def _found(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The definition that a schema refers to, or itself."""
    at = schema.get("$ref", "") if isinstance(schema, dict) else ""
    for name in _DEFINED:
        known = whole.get(name)
        if isinstance(known, dict) and at.startswith(f"#/{name}/"):
            return known.get(at.removeprefix(f"#/{name}/"), schema)
    return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else set(kind)


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether it is one of some texts."""
    known = schema.keys() <= _NOTES | {"type", "enum", "const"} and _types(schema) <= {"string"}
    return known and bool(texts := _texts(schema)) and all(isinstance(text, str) for text in texts)


def _texts(schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("type") == "null":
        return ["null"]
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _whole(text: str) -> bool:
    """Whether the reader, which leaves out the space around, reads just this text."""
    return text == text.strip() and "</parameter>" not in text and "</function>" not in text


def _check_name(name: str, what: str) -> None:
    if not name or ">" in name or "\n" in name:
        raise ValueError(f"{what} cannot be called: its name is empty, or has > or a line end")


def _unsure(name: str, why: str) -> ValueError:
    return ValueError(
        f"the schema of {shown(name)} {why}; a call of it cannot be ensured with a target that "
        "writes arguments between tags: simplify it, or let the model choose"
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
