"""Builds a Recipe from nested dicts; every mistake is one line with the key's full path.

`@strict` of huggingface_hub checks types and ranges. What it does not do is done here: key paths,
unknown and missing keys, and an integer where a float is expected.
"""

import dataclasses
import types
import typing
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError

from .fields import RecipeError, nearest
from .schema import DrafterSpec, Recipe


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a nested dict against the schema and build the Recipe. Raises RecipeError."""
    return _section(Recipe, data, "")


def _section(cls: type, data: Any, path: str) -> Any:
    """The dataclass `cls` of the dict at key path `path`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    takes = ", ".join(fields) if cls is not DrafterSpec else "family and that family's options"
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {kind(data)}, expected a mapping of {takes}")
    if cls is DrafterSpec:  # all other keys belong to the family's config class
        options = {str(key): value for key, value in data.items() if key != "family"}
        data = {key: data[key] for key in data if key == "family"} | {"options": options}
    values, probe = {}, object.__new__(cls)
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = nearest(str(key), fields)
            raise RecipeError(f"{where}: unknown key{near}; {path or 'a recipe'} takes {takes}")
        hint = fields[key].type
        values[key] = _convert(hint, value, where)
        try:  # one field at a time: the error of a whole section does not say which field it was
            setattr(probe, key, values[key])
        except StrictDataclassFieldValidationError as error:
            said = error.__cause__
            if isinstance(said, TypeError):
                said = f"found {kind(value)}, expected {_describe(hint)}"
            raise RecipeError(f"{where}: {said}") from None
    for field in fields.values():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            where = f"{path}.{field.name}" if path else field.name
            raise RecipeError(f"{where}: missing; a recipe must give it")
    return cls(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """A mapping as its section, and an integer as a float where the type is one."""
    union = _is_union(hint)
    for member in typing.get_args(hint) if union else (hint,):
        if dataclasses.is_dataclass(member) and not (union and value is None):
            assert isinstance(member, type)
            return _section(member, value, path)
        if member is float and type(value) is int:
            return float(value)
    return value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _describe(hint: Any) -> str:
    """A type in words: `a number or null`."""
    if _is_union(hint):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    names = {int: "an integer", float: "a number", str: "a string", types.NoneType: "null"}
    return names.get(hint, "a list" if typing.get_origin(hint) is list else "a mapping")


def kind(value: Any) -> str:
    """A value found in a recipe, in words: `the string '3'`, `null`.

    >>> kind([1]), kind(True), kind({})
    ('the list [1]', 'the boolean True', 'a mapping')
    """
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return f"the {names.get(type(value), type(value).__name__)} {value!r}"
