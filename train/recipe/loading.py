"""Reads recipes: YAML, with a base recipe below and `a.b=value` overrides on top, as a Recipe.

Every mistake is one line that opens with the key's full path.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassFieldValidationError

from .schema import DrafterSpec, Recipe, RecipeError, nearest


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name, and apply `a.b=value` overrides.

    Override values are read as YAML, so `train.max_seconds=null` and
    `decode.tree=[[0],[0,0],[1]]` work. A recipe whose `base` is another recipe, a shipped name or a
    path beside it, has the base's sections and changes single keys of them; its `drafter` section,
    whose keys belong to a family, stands for itself. Raises RecipeError.
    """
    data = _read(_find(str(name_or_path)))
    for override in overrides:
        _override(data, override)
    return parse_recipe(data)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package: name to path."""
    from headstart import recipes

    (folder,) = recipes.__path__
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a nested dict against the schema and build the Recipe. Raises RecipeError."""
    return _section(Recipe, data, "")


def _find(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    raise RecipeError(
        f"no recipe {name!r}: neither a file nor a shipped recipe{nearest(name, shipped)}; "
        f"shipped: {', '.join(shipped) or 'none'}"
    )


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe file's keys, those of its base included; `above` are the files it is the base of."""
    data = _yaml(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {_kind(data)}, expected a mapping of recipe keys")
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"base: found {_kind(base)}, expected a recipe's name or path")
    if "name" not in data:
        raise RecipeError("name: missing; a recipe with a base must give its own")
    beside = path.parent / base
    found = beside if beside.is_file() else _find(base)
    above = (*above, path.resolve())
    if found.resolve() in above:
        raise RecipeError(f"base: {base!r} is based on {path.name} itself; expected another recipe")
    whole = _read(found, above)
    for key, value in data.items():
        sections = isinstance(value, dict) and isinstance(whole.get(key), dict)
        whole[key] = {**whole[key], **value} if sections and key != "drafter" else value
    return whole


def _override(data: dict[str, Any], override: str) -> None:
    """Apply `a.b=value` in place; sections that are absent or null are made."""
    key, equals, text = override.partition("=")
    *names, last = key.strip().split(".")
    if not equals or not all([*names, last]):
        raise RecipeError(f"override {override!r}: expected key=value, e.g. train.max_steps=100")
    value = _yaml(text, f"override {override!r}")
    for depth, name in enumerate(names, start=1):
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, dict):
            path = ".".join(names[:depth])
            raise RecipeError(f"override {override!r}: {path} is {_kind(data)}, not a section")
    data[last] = value


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `8e-3` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RecipeError(f"{key.value}: given twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a signed exponent, and reads 8e-3 and 1.5e3 as strings.
_SCIENTIFIC = re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
# A date is a string, as the schema has it, with or without quotes.
for first, resolvers in _Loader.yaml_implicit_resolvers.items():
    kept = [pair for pair in resolvers if pair[0] != "tag:yaml.org,2002:timestamp"]
    _Loader.yaml_implicit_resolvers[first] = kept


def _yaml(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        one_line = " ".join(str(error).split())
        raise RecipeError(f"{where}: not valid YAML: {one_line}") from error


def _section(cls: type, data: Any, path: str) -> Any:
    """The dataclass `cls` of the mapping at key path `path`.

    Done here is what `@strict` does not do: key paths, unknown and missing keys, sections in
    sections, and an integer where a float is expected.
    """
    # `from` is a key of recipes and a keyword of Python.
    fields = {field.name.removesuffix("_"): field for field in dataclasses.fields(cls)}
    takes = ", ".join(fields) if cls is not DrafterSpec else "family and that family's options"
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: found {_kind(data)}, expected a mapping of {takes}")
    if cls is DrafterSpec:  # all other keys belong to the family's config class
        options = {str(key): value for key, value in data.items() if key != "family"}
        data = {key: data[key] for key in data if key == "family"} | {"options": options}
    values, probe, prefix = {}, object.__new__(cls), f"{path}." if path else ""
    for key, value in data.items():
        where = f"{prefix}{key}"
        if key not in fields:
            near = nearest(str(key), fields)
            raise RecipeError(f"{where}: unknown key{near}; {path or 'a recipe'} takes {takes}")
        hint = fields[key].type
        members = {*typing.get_args(hint), hint}  # of a union, or of no interest
        section: Any = next(filter(dataclasses.is_dataclass, members), None)
        if section and typing.get_origin(hint) is list:
            if isinstance(value, list):
                items = enumerate(value)
                value = [_section(section, item, f"{where}[{i}]") for i, item in items]
        elif section and (value is not None or types.NoneType not in members):
            value = _section(section, value, where)
        elif float in members and type(value) is int:
            value = float(value)
        try:  # one field at a time: the error of a whole section does not say which field it was
            setattr(probe, fields[key].name, value)
        except StrictDataclassFieldValidationError as error:
            said = error.__cause__
            if isinstance(said, TypeError):
                said = f"found {_kind(value)}, expected {_describe(hint)}"
            raise RecipeError(f"{where}: {said}") from None
        values[fields[key].name] = value
    for name, field in fields.items():
        if (
            field.name not in values
            and field.default is field.default_factory is dataclasses.MISSING
        ):
            raise RecipeError(f"{prefix}{name}: missing; a recipe must give it")
    return cls(**values)


def _describe(hint: Any) -> str:
    """A type in words: `a number or null`."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    names = {int: "an integer", float: "a number", str: "a string", types.NoneType: "null"}
    return names.get(hint, "a list" if typing.get_origin(hint) is list else "a mapping")


def _kind(value: Any) -> str:
    """A value found in a recipe, in words: `the string '3'`, `a mapping`, `null`."""
    if value is None or isinstance(value, dict):
        return "null" if value is None else "a mapping"
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return f"the {names.get(type(value), type(value).__name__)} {value!r}"
