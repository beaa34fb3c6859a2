"""Reads recipes as a Recipe: their files, see `files`, with `a.b=value` overrides on top.

Every mistake is one line that opens with the key's full path.
"""

import copy
import dataclasses
import logging
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError

from headstart.heads.families import check_options, with_article

from .fields import RecipeError, nearest
from .files import kind_of, own_settings, read_recipe, read_yaml
from .schema import DrafterSpec, Recipe

logger = logging.getLogger(__name__)

_OWN = "own-model"
"""The shipped recipe whose family users change."""

_warned = set[tuple[str, ...]]()  # of which families and settings, since a recipe is read again


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name, and apply `a.b=value` overrides.

    A name may also join parts, `medusa+llama-3.1-8b+1x80gb`, see `files`. Override values are read
    as YAML, so `train.max_seconds=null` and `decode.tree=[[0],[0,0],[1]]` work. A recipe whose
    `base` is another recipe (a shipped name, a path beside it, parts joined by +, or a list of such
    names, of which later ones override earlier ones) has the base's sections and changes single
    keys of them; a `drafter` section that names its family stands for itself.

    Raises:
        RecipeError: no such recipe, or one that is malformed.
        OptionError: no such family, or options that it does not have.
    """
    data, overrides = read_recipe(str(name_or_path)), list(overrides)
    recipe = recipe_of(data, overrides)
    if str(name_or_path) == _OWN and recipe.drafter.family != data["drafter"]["family"]:
        _warn_of_settings(recipe.drafter.family, data, overrides)
    return recipe


def _warn_of_settings(family: str, data: dict[str, Any], overrides: list[str]) -> None:
    """Say which settings of training remain those of another family."""
    given = {override.partition("=")[0].strip() for override in overrides}
    left = {
        name: value
        for name, value in own_settings(family).items()
        if data["train"].get(name) != value and f"train.{name}" not in given
    }
    kept = family, *left
    if left and kept not in _warned and int(os.environ.get("RANK", 0)) == 0:
        _warned.add(kept)
        part, said = family.replace("_", "-"), [f"{name} {value}" for name, value in left.items()]
        logger.warning(
            f"{_OWN} trains {with_article(family)} drafter as it trains "
            f"{data['drafter']['family']} heads; {part}+1x80gb, with your target and prompts, has "
            f"its own settings ({', '.join(said[:4])}{', …' if said[4:] else ''})."
        )


def recipe_of(data: dict[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """The Recipe of a file's keys, with `a.b=value` overrides; raises as `load_recipe` does."""
    data = copy.deepcopy(data)
    for override in overrides:
        _override(data, override)
    recipe = parse_recipe(data)
    check_options(recipe.drafter.family, recipe.drafter.options)
    return recipe


def keys_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys of a file for a recipe that `to_dict` has written, as manifests hold it."""
    found = copy.deepcopy(recipe)
    drafter = found["drafter"]
    found["drafter"] = {"family": drafter["family"], **drafter["options"]}
    return found


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a nested dict against the schema and build the Recipe. Raises RecipeError."""
    return parse_section(Recipe, data)


def _override(data: dict[str, Any], override: str) -> None:
    """Apply `a.b=value` in place; sections that are absent or null are made."""
    key, equals, text = override.partition("=")
    *names, last = key.strip().split(".")
    if not equals or not all([*names, last]):
        raise RecipeError(f"override {override!r}: expected key=value, e.g. train.max_steps=100")
    value = read_yaml(text, f"override {override!r}")
    for depth, name in enumerate(names, start=1):
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, dict):
            path = ".".join(names[:depth])
            raise RecipeError(f"override {override!r}: {path} is {kind_of(data)}, not a section")
    data[last] = value


def parse_section(cls: type, data: Any, path: str = "", whole: str = "a recipe") -> Any:
    """The strict dataclass `cls` of the mapping at key path `path`. Raises RecipeError.

    Args:
        whole: what a mapping without a path is called in errors.

    Done here is what `@strict` does not do: key paths, unknown and missing keys, sections in
    sections, and an integer where a float is expected.
    """
    # `from` is a key of recipes and a keyword of Python.
    fields = {field.name.removesuffix("_"): field for field in dataclasses.fields(cls)}
    takes = ", ".join(fields) if cls is not DrafterSpec else "family and that family's options"
    if not isinstance(data, dict):
        found = f"{path or whole}: found {kind_of(data)}"
        raise RecipeError(f"{found}, expected a mapping of {takes}")
    if cls is DrafterSpec:  # all other keys belong to the family's config class
        options = {str(key): value for key, value in data.items() if key != "family"}
        data = {key: data[key] for key in data if key == "family"} | {"options": options}
    values, probe, prefix = {}, object.__new__(cls), f"{path}." if path else ""
    for key, value in data.items():
        where = f"{prefix}{key}"
        if key not in fields:
            near = nearest(str(key), fields)
            raise RecipeError(f"{where}: unknown key{near}; {path or whole} takes {takes}")
        hint = fields[key].type
        members = {*typing.get_args(hint), hint}  # of a union, or of no interest
        section: Any = next(filter(dataclasses.is_dataclass, members), None)
        if section and typing.get_origin(hint) is list:
            if isinstance(value, list):
                items = enumerate(value)
                value = [parse_section(section, item, f"{where}[{i}]") for i, item in items]
        elif section and (value is not None or types.NoneType not in members):
            value = parse_section(section, value, where)
        elif float in members and type(value) is int:
            value = float(value)
        try:  # one field at a time: the error of a whole section does not say which field it was
            setattr(probe, fields[key].name, value)
        except StrictDataclassFieldValidationError as error:
            said = error.__cause__
            if isinstance(said, TypeError):
                said = f"found {kind_of(value)}, expected {_describe(hint)}"
            raise RecipeError(f"{where}: {said}") from None
        values[fields[key].name] = value
    for name, field in fields.items():
        if (
            field.name not in values
            and field.default is field.default_factory is dataclasses.MISSING
        ):
            raise RecipeError(f"{prefix}{name}: missing; {whole} must give it")
    return cls(**values)


def _describe(hint: Any) -> str:
    """A type in words: `a number or null`, `a list of strings`."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    names: dict[Any, str] = {
        int: "an integer", float: "a number", str: "a string", types.NoneType: "null",
        bool: "true or false",
    }  # fmt: skip
    if hint in names:
        return names[hint]
    said = "a list of" if typing.get_origin(hint) is list else "a mapping to"
    member = next(reversed(typing.get_args(hint)), Any)
    if member is Any:
        return said.rpartition(" ")[0]
    return f"{said} {'strings' if member is str else 'mappings'}"
